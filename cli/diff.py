"""``trilith diff A B``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .say import say


def diff(
    a: Annotated[Path, typer.Argument(help="a Hugging Face folder, a checkpoint, or a run's folder")],
    b: Annotated[Path, typer.Argument(help="another, of any layout or form")],
    most: Annotated[int, typer.Option("--most", min=1, help="show so many differing tensors")] = 20,
) -> None:
    """Compare the weights (and, between runs, the moments) of two folders; exit code 1 if they differ."""
    from itertools import islice

    from ..checkpoints import differences, read_source, verify

    first = read_source(a)
    second = read_source(b, module=first.module)
    for source in (first, second):
        if source.manifest is not None:
            verify(source.path, source.manifest)
    found = list(islice(differences(first, second), most + 1))
    for one in found[:most]:
        figures = f"  {one.elements:,} elements, max abs {one.absolute:.3g}, max rel {one.relative:.3g}"
        say(f"{one.name}: {one.what}" + (figures if one.elements else ""))
    if len(found) > most:
        say("... and more (--most)")
    if found:
        raise typer.Exit(1)
    say("equal, bit for bit")
