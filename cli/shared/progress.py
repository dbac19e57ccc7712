"""Show progress bars in bytes (done, rate, time left) on stderr, if it is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
