"""``trilith generate DIR --prompt TEXT``."""

from pathlib import Path
from typing import Annotated

import typer

from .shared.options import ADAPTER, DEVICE, DTYPE, FORCE, LARGEST_SEED, Strict
from .shared.parameters import (
    As,
    Count,
    Place,
    Range,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    from_options,
)
from .shared.say import pieces_of_text, say_aside


def generate(
    context: typer.Context,
    source: Annotated[Place, As("DIR"), "Hugging Face folder, checkpoint, or a run's folder"],
    *,
    prompt: Annotated[list[str] | None, As("--prompt", "-p"), "text to continue; may be repeated"] = None,
    prompt_file: Annotated[Path | None, "prompts, one a line, or .jsonl with prompt or messages"] = None,
    chat: Annotated[bool, "treat prompts as messages of a user, by the tokenizer's chat template"] = False,
    system: Annotated[str | None, "system message, for --chat"] = None,
    max_new_tokens: Annotated[int, Range(1, 2**20), "largest number of tokens to add"] = 64,
    min_new_tokens: Annotated[int, Range(0), "smallest number of tokens to add"] = 0,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Annotated[int, Range(0, LARGEST_SEED), "seed of the sampling; each prompt has its own numbers"] = 0,
    stop: Annotated[list[str] | None, "text that ends a continuation; may be repeated"] = None,
    ignore_eos: Annotated[bool, "do not stop at the model's end tokens"] = False,
    batch: Annotated[Count, "number of prompts computed at once"] = 16,
    out: Annotated[Path | None, "JSONL file to write, with one object for each prompt"] = None,
    force: Annotated[bool, FORCE] = False,
    tensor: Annotated[Count, "number of tensor-parallel ranks, as local processes"] = 1,
    pipeline: Annotated[Count, "number of pipeline stages, as local processes"] = 1,
    dtype: Annotated[str, DTYPE] = "float32",
    device: Annotated[str, DEVICE] = "auto",
    tokenizer: Annotated[Path | None, "tokenizer folder; default: DIR"] = None,
    adapter: Annotated[Path | None, ADAPTER] = None,
    status: Annotated[Path | None, typer.Option(hidden=True)] = None,
    strict: Strict = False,
) -> None:
    """Continue texts with a model, on one device or in a layout.

    The text of a single prompt is printed as it grows. For several prompts the command prints one JSON object
    each, with prompt, text, tokens and finish (stop or length). All layouts give the same text. The ranks may
    also be started by torchrun.

    Examples:

        trilith generate Llama-3.2-1B --prompt "def main():"
        trilith generate Llama-3.2-1B --prompt-file asked.jsonl --chat --temperature 0.7 --out answers.jsonl
        trilith generate run --prompt "Once" --tensor 2
    """
    options = locals()
    from ..generation import Sampling
    from ..generation.command import Ranks
    from ..generation.request import Request, run_generation
    from ..generation.text import read_prompts
    from ..parallel_state import Layout

    prompts, sampling = read_prompts(prompt or [], prompt_file), from_options(Sampling, options)
    request = from_options(Request, options, prompts=prompts, sampling=sampling, stop=stop or [])
    ranks = Ranks(Layout.of(tensor=tensor, pipeline=pipeline), context.obj, say_aside, device, status)
    with pieces_of_text() as write:
        code = run_generation(request, ranks, write=write, out=out, force=force)
    raise typer.Exit(code)
