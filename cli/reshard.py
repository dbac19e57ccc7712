"""``trilith reshard SRC DST``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .convert import convert
from .shared.options import DRY_RUN, PATH_OR_ADDRESS, SPLIT, Strict


def reshard(
    src: Annotated[str, typer.Argument(help="checkpoint or a run's folder", metavar="SRC"), PATH_OR_ADDRESS],
    dst: Annotated[Path, typer.Argument(help="new folder for the checkpoint", metavar="DST")],
    tensor: Annotated[int, typer.Option(min=1, help="number of tensor-parallel ranks to cut for")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="number of pipeline stages to cut for")] = 1,
    split: Annotated[str | None, typer.Option(help=SPLIT)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN)] = False,
    strict: Strict = False,
) -> None:
    """Cut a checkpoint for another layout, optimizer moments included.

    The result has one file for each of TENSOR x PIPELINE ranks. A run does not need this command: it loads a
    checkpoint of any layout. Use it when each host should have only the files of its own ranks.

    Examples:

        trilith reshard run cut --tensor 2 --pipeline 2
        trilith reshard run cut --tensor 2 --dry-run
    """
    convert(src, dst, to="sharded", tensor=tensor, pipeline=pipeline, split=split, dry_run=dry_run)
