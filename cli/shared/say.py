"""Print for commands, progress too: unchanged into a file or a pipe, and made fit for a terminal on one."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


def say(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print text, which may have come from anywhere."""
    stream = sys.stderr if err else sys.stdout
    # color: typer would else take sequences out of what goes into a pipe.
    typer.echo(visible(text) if stream.isatty() else text, nl=nl, err=err, color=True)


@contextmanager
def pieces_of_text() -> Iterator[Callable[[str], None]]:
    """Yield what prints text piece by piece; a failure within a line ends it, so that its error has one."""
    last = "\n"

    def write(text: str) -> None:
        nonlocal last
        last = text or last
        say(text, nl=False)

    try:
        yield write
    except BaseException:
        if not last.endswith("\n"):
            with suppress(OSError):  # nobody may be reading any more
                say("")
        raise


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call, from any thread, with the bytes done since the last call."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    from ...runs.terminal import plain_console

    console = plain_console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)


@contextmanager
def token_progress(total: int, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with the bytes read and the tokens written so far."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    from ...runs.terminal import plain_console

    console = plain_console(stderr=True)
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        Speed(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    ) as progress:
        task = progress.add_task("tokenizing", total=total, tokens=0, start=False)

        def moved(done: int, tokens: int) -> None:
            if not progress.tasks[0].started:  # what an earlier run finished is no part of this one's rate
                progress.reset(task, completed=done, start=True)
            progress.update(task, completed=done, tokens=tokens)

        yield moved
