"""``trilith evaluate DIR TOKENS``."""

import json as to_json
from pathlib import Path
from typing import Annotated

import typer

from ..system import counted
from .shared.options import ADAPTER, DEVICE, DTYPE, Strict
from .shared.parameters import As, Count, MaybeCount, Place, Range
from .shared.say import say


def evaluate(
    context: typer.Context,
    source: Annotated[Place, As("DIR"), "Hugging Face folder, checkpoint, or a run's folder"],
    tokens: Annotated[Path, "token file of trilith tokenize"],
    *,
    sequence_length: Annotated[
        MaybeCount, "tokens of a row; default: those of the run, else 2048 or the most that the model takes"
    ] = None,
    rows: Annotated[MaybeCount, "number of rows, drawn as with seed 0; default: all"] = None,
    batch: Annotated[int, Range(1, 2**16), "number of rows computed at once"] = 4,
    tensor: Annotated[Count, "number of tensor-parallel ranks, as local processes"] = 1,
    pipeline: Annotated[Count, "number of pipeline stages, as local processes"] = 1,
    dtype: Annotated[str, DTYPE] = "float32",
    device: Annotated[str, DEVICE] = "auto",
    adapter: Annotated[Path | None, ADAPTER] = None,
    json: Annotated[bool, "print one JSON object, for programs"] = False,
    status: Annotated[Path | None, typer.Option(hidden=True)] = None,
    strict: Strict = False,
) -> None:
    """Compute the loss and the perplexity of a model on a token file.

    The loss is the mean over all tokens that count (of conversations: the assistant's), in nats, the same in
    every layout. A row has the length of the run's; rows are otherwise cut as in training by default:
    documents are joined, samples packed, overlong ones refused. A run's evaluation prints the loss of
    `evaluation.samples` rows (64), drawn with its own seed and cut as its section [data] says: the same
    number where the rows are the same. Perplexities of models with different tokenizers are not comparable.
    For tasks such as MMLU export the model (`trilith convert DIR OUT --to hf`) and run lm-eval on the folder.

    Examples:

        trilith evaluate Llama-3.2-1B held-out --dtype bf16
        trilith evaluate run held-out --sequence-length 1024 --rows 200
        trilith evaluate Llama-3.2-1B chat --adapter chat-run --json
    """
    from ..generation.command import Ranks
    from ..parallel_state import Layout
    from ..training.evaluation import Figures, Question, run_evaluation

    def show(figures: Figures) -> str:
        if json:
            return to_json.dumps(vars(figures))
        rows = f"{counted(figures.rows, 'row')} of {figures.sequence_length:,}"
        perplexity = "inf" if figures.perplexity is None else f"{figures.perplexity:.4g}"
        tokens = counted(figures.tokens, "token")
        return f"loss {figures.loss:.4f}  perplexity {perplexity}  over {tokens} of {rows}"

    question = Question(source, tokens, sequence_length, rows, batch, dtype, adapter)
    ranks = Ranks(Layout.of(tensor=tensor, pipeline=pipeline), context.obj, say, device, status)
    raise typer.Exit(run_evaluation(question, ranks, show))
