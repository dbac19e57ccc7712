"""``trilith generate DIR --prompt TEXT``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    source: Annotated[
        Path, typer.Argument(help="a Hugging Face folder or a trilith checkpoint", metavar="DIR")
    ],
    prompt: Annotated[str, typer.Option(help="the text to continue")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="how many tokens to add at most")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="sample from the k likeliest tokens; 0: from all")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="sample from this much probability")] = 1.0,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="a tokenizer folder, if DIR has none")] = None,
) -> None:
    """Continue a text with a model, on one device."""
    from ..checkpoints import load_model, read_source
    from ..models import Sampling
    from ..models import generate as continue_tokens
    from ..training.tokenizer import load_tokenizer

    text = load_tokenizer(tokenizer or read_source(source).path)
    model = load_model(source)
    ids = text.encode(prompt)
    out = continue_tokens(
        model,
        [ids],
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p),
        stop=() if text.eos_id is None else (text.eos_id,),
        seed=seed,
    )
    typer.echo(text.decode(ids + out[0]))
