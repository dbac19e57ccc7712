"""Run ``trilith evaluate`` on its ranks: the loss of stored weights on a token file, as a run computes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..data.batches import GlobalBatches
from ..data.token_file import TokenFile
from ..data.token_index import check_vocabulary
from ..generation.command import Weights, run_on_ranks
from ..parallel_state import BadInput, Layout, ParallelState
from .evaluation import Evaluator, perplexity
from .run_data import HeldOut, check_tokenizer
from .step import Step
from .token_loss import TokenLoss

#: The length of a row unless another one is asked for, a run trained with another, or the model takes less.
_LENGTH = 2048


@dataclass(frozen=True)
class Question:
    """State what to evaluate, on which rows. ``batch``: number of rows computed at once."""

    source: str | Path
    tokens: Path
    sequence_length: int | None = None
    rows: int | None = None
    batch: int = 4
    dtype: str = "float32"
    adapter: Path | None = None


@dataclass(frozen=True)
class Figures:
    """Report the mean loss in nats over the tokens that count, and its perplexity, ``None`` if too large."""

    loss: float
    perplexity: float | None
    tokens: int
    rows: int
    sequence_length: int


@dataclass(frozen=True)
class _Opened(Weights):
    held_out: HeldOut
    batches: GlobalBatches


def run_evaluation(
    question: Question,
    layout: Layout,
    *,
    words: Sequence[str],
    show: Callable[[Figures], str],
    note: Callable[[str], None],
    device: str = "auto",
    status: Path | None = None,
) -> int:
    """Give ``note`` the figures as ``show`` writes them; the exit code. The rest: see ``run_on_ranks``."""

    def evaluate(opened: _Opened, state: ParallelState, device: str) -> str:
        model, batches, rows = opened.load(state), opened.batches, opened.held_out.samples
        loss = Evaluator(Step(model, TokenLoss(model), micro_batch=question.batch), opened.held_out)()
        tokens = batches.count_labels(0, range(rows))
        return show(Figures(loss, perplexity(loss), tokens, rows, batches.sequence_length))

    prepare, asked = partial(_open, question, layout), repr(question)
    return run_on_ranks(
        layout, prepare, evaluate, asked=asked, words=words, note=note, device=device, status=status
    )


def _open(question: Question, layout: Layout) -> _Opened:
    """Read everything but the weights. Raises ``BadInput`` for what cannot be evaluated."""
    weights = Weights.of(question.source, question.adapter, layout, question.dtype, "evaluate")
    source = weights.source
    config, most = source.model_config, source.model_config.max_position_embeddings
    file = TokenFile.open(question.tokens)
    check_vocabulary(file.vocab_size, config.vocab_size, question.tokens)
    manifest = (weights.adapter or source).manifest
    position = None if manifest is None else manifest.data_position
    trained = position.get("sequence_length") if isinstance(position, dict) else None
    trained = trained if isinstance(trained, int) and trained > 0 else None
    length = question.sequence_length or trained or min(_LENGTH, most)
    if length > most:
        raise BadInput("evaluate", "--sequence-length", expected=f"at most {most:,}", found=f"{length:,}")
    batches = GlobalBatches(file, length, 1, 0)
    check_tokenizer(batches, source.path, "evaluate")
    rows = batches.samples if question.rows is None else min(question.rows, batches.samples)
    batches = batches.resized(rows)
    return _Opened(**vars(weights), held_out=HeldOut(batches, rows), batches=batches)
