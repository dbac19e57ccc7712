"""Print for commands: unchanged into a file or a pipe, and made fit for a terminal on a terminal."""

from __future__ import annotations

import sys

import typer

from ...system import visible


def say(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print text, which may have come from anywhere."""
    stream = sys.stderr if err else sys.stdout
    # color: typer would else take sequences out of what goes into a pipe.
    typer.echo(visible(text) if stream.isatty() else text, nl=nl, err=err, color=True)
