"""A progress bar in bytes: done, rate, time left. On stderr, and only where somebody can watch it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """While it lasts, call what it gives with the bytes done since the last call, from any thread."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)
