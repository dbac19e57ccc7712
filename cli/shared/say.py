"""Print for commands, progress too: unchanged into a file or a pipe, and made fit for a terminal on one."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from ...system import visible

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table
    from rich.text import Text


def say(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print text, which may have come from anywhere."""
    stream = sys.stderr if err else sys.stdout
    # color: typer would else take sequences out of what goes into a pipe.
    typer.echo(visible(text) if stream.isatty() else text, nl=nl, err=err, color=True)


#: Prints text that is no part of what a program would read.
say_aside = partial(say, err=True)


def say_next(*commands: Sequence[object]) -> None:
    """Say which commands of trilith usually follow, each by its words."""
    for number, words in enumerate(commands):
        say(f"{'     ' if number else 'next:'} trilith {shlex.join(map(str, words))}")


def say_json(value: object, default: Callable[[Any], object] | None = None) -> None:
    """Print an object for programs; ``default`` turns what JSON does not know into what it does."""
    say(json.dumps(value, indent=2, default=default))


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


def table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str | Text]] = (), *, right: Container[str] = ()
) -> Table:
    """Return a table with a title on its left; columns of numbers are set ``right``."""
    from rich.table import Table

    columns = Table(title=title, title_justify="left")
    for name in head:
        columns.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        columns.add_row(*row)
    return columns


def print_table(rows: Table) -> None:
    """Print a table whose longest line is as wide as it needs to be."""
    from ...runs.terminal import plain_console

    plain_console(soft_wrap=True).print(rows)


@contextmanager
def progress_bar(
    *columns: ProgressColumn, quiet: bool = False, transient: bool = False
) -> Iterator[Progress]:
    """Yield a display of tasks, each with its description, a bar and ``columns``, on a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn

    from ...runs.terminal import plain_console

    console = plain_console(stderr=True)
    head = TextColumn("{task.description}", markup=False), BarColumn()
    hidden = quiet or not console.is_terminal
    with Progress(*head, *columns, console=console, transient=transient, disable=hidden) as progress:
        yield progress


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call, from any thread, with the bytes done since the last call."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with progress_bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)


@contextmanager
def token_progress(total: int, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with the bytes read and the tokens written so far."""
    from rich.progress import DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    tokens_written = TextColumn("{task.fields[tokens]:,} tokens")
    columns = DownloadColumn(), TransferSpeedColumn(), tokens_written, TimeRemainingColumn()
    with progress_bar(*columns, quiet=quiet, transient=True) as progress:
        task = progress.add_task("tokenizing", total=total, tokens=0)
        # rich's rate leaves out the first update, and so what an earlier run finished.
        yield lambda done, tokens: progress.update(task, completed=done, tokens=tokens)
