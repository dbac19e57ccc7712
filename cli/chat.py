"""``trilith chat DIR``."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from .shared.options import ADAPTER, DEVICE, DTYPE, LARGEST_SEED, PATH_OR_ADDRESS, Strict
from .shared.say import pieces_of_text, say


def chat(
    source: Annotated[
        str,
        typer.Argument(help="Hugging Face folder, checkpoint, or a run's folder", metavar="DIR"),
        PATH_OR_ADDRESS,
    ],
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=2**20, help="largest number of tokens of an answer")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="sampling temperature; 0: always take the likeliest token")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="sample from the K likeliest tokens; 0: from all")] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="sample from the likeliest tokens whose probabilities reach this sum"
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="seed of the sampling")] = 0,
    dtype: Annotated[str, typer.Option(help=DTYPE)] = "float32",
    device: Annotated[str, typer.Option(help=DEVICE)] = "auto",
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer folder with a chat template; default: DIR")
    ] = None,
    adapter: Annotated[Path | None, typer.Option(help=ADAPTER)] = None,
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
    from .shared.inputs import check_weights_there

    check_weights_there(source, "a Hugging Face folder or a checkpoint")
    from ..generation import Sampling
    from ..generation.chat import converse
    from ..generation.request import Request

    request = Request(
        source,
        [],
        tokenizer=tokenizer,
        system=system,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p),
        seed=seed,
        dtype=dtype,
        adapter=adapter,
    )
    with pieces_of_text() as write:
        converse(
            request,
            _lines(),
            write=write,
            note=lambda text: say(text, err=True),
            device=device,
        )


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
