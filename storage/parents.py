"""Make the folders above an output when it begins, and remove them again if no output comes about."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .disk import Disk


def make_parents(folder: Path, disk: Disk | None = None) -> list[Path]:
    """Make the folders that are missing; gives those that were made, the outermost first. All or none."""
    made: list[Path] = []
    disk = disk or Disk()
    try:
        for parent in reversed([folder, *folder.parents]):
            _make(parent, disk, made)
    except BaseException:
        remove_empty(made)
        raise
    return made


def _make(folder: Path, disk: Disk, made: list[Path]) -> None:
    if folder.exists():  # so is ``new/../new``, once ``new`` is there
        return
    try:
        disk.make_directory(folder)
    except FileExistsError:
        if folder.is_dir():  # another process made it just now
            return
        raise
    made.append(folder)
    disk.sync_directory(folder.parent)


def remove_empty(made: Sequence[Path]) -> None:
    """Remove what ``make_parents`` made, but for a folder in which somebody else put a file."""
    for folder in reversed(made):
        with suppress(OSError):
            folder.rmdir()
