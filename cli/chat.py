"""``trilith chat DIR``."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from .shared.options import ADAPTER, DEVICE, DTYPE, LARGEST_SEED, Strict
from .shared.parameters import As, Place, Range, RepetitionPenalty, Temperature, TopK, TopP, from_options
from .shared.say import pieces_of_text, say_aside


def chat(
    source: Annotated[Place, As("DIR"), "Hugging Face folder, checkpoint, or a run's folder"],
    *,
    system: Annotated[str | None, "system message"] = None,
    max_new_tokens: Annotated[int, Range(1, 2**20), "largest number of tokens of an answer"] = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Annotated[int, Range(0, LARGEST_SEED), "seed of the sampling"] = 0,
    dtype: Annotated[str, DTYPE] = "float32",
    device: Annotated[str, DEVICE] = "auto",
    tokenizer: Annotated[Path | None, "tokenizer folder with a chat template; default: DIR"] = None,
    adapter: Annotated[Path | None, ADAPTER] = None,
    strict: Strict = False,
) -> None:
    """Talk with a model on one device: each line typed is a message, and is answered.

    The tokenizer's chat template writes the conversation, and every answer sees all that came before it. A
    line `/new` begins a new conversation; Ctrl-D, or the end of the input, ends the command. To answer many
    prompts at once, or over several ranks, use `trilith generate --chat`.

    Examples:

        trilith chat chat-run
        trilith chat SmolLM2-135M-Instruct --temperature 0.7 --system "Answer in one sentence."
    """
    options = locals()
    from ..generation import Sampling
    from ..generation.request import Request, converse

    request = from_options(Request, options, prompts=[], sampling=from_options(Sampling, options))
    with pieces_of_text() as write:
        converse(request, _lines(), write=write, note=say_aside, device=device)


def _lines() -> Iterator[str]:
    """Yield what is typed, after a prompt on a terminal, or the lines of a pipe."""
    if sys.stdin is None:  # closed by whoever started this
        return
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        yield line.encode(errors="replace").decode()
