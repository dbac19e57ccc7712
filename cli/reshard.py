"""``trilith reshard SRC DST``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .convert import convert


def reshard(
    src: Annotated[Path, typer.Argument(help="a checkpoint or a run's folder")],
    dst: Annotated[Path, typer.Argument(help="a new folder")],
    tensor: Annotated[int, typer.Option(min=1, help="tensor ranks")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="pipeline stages")] = 1,
    split: Annotated[str | None, typer.Option(help="blocks of each stage by hand, such as 3,2")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and write nothing")] = False,
) -> None:
    """Cut a checkpoint for another layout, weights and moments alike: one file a rank.

    Loading does this by itself; a reshard is for moving files to where their ranks are, once.
    """
    convert(src, dst, to="sharded", tensor=tensor, pipeline=pipeline, split=split, dry_run=dry_run)
