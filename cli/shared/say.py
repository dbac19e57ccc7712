"""Print for commands: unchanged into a file or a pipe, and made fit for a terminal on a terminal."""

import sys
import warnings
from pathlib import Path

import typer

from ...system import visible

#: Where our modules lie.
_PACKAGE = Path(__file__).resolve().parents[2]
_format_with_code = warnings.formatwarning


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning of ours as one line for users; one of a library as Python does, with its code.

    It stands in for ``warnings.formatwarning``.
    """
    file = Path(filename).resolve()
    if not file.is_relative_to(_PACKAGE) or "site-packages" in file.relative_to(_PACKAGE).parts:
        return _format_with_code(message, category, filename, lineno, line)
    return f"warning: {' '.join(visible(str(message)).split())}\n"


def counted(number: int, noun: str, ending: str = "s") -> str:
    """Return a number of things in words: ``1 file``, ``2 files``; ``ending``: of several."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{ending}"


def say(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print text, which may have come from anywhere."""
    stream = sys.stderr if err else sys.stdout
    # color: typer would else take sequences out of what goes into a pipe.
    typer.echo(visible(text) if stream.isatty() else text, nl=nl, err=err, color=True)
