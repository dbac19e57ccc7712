"""Make the folders above an output when it begins, and remove them again if no output comes about."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .disk import Disk


def make_parents(folder: Path, disk: Disk | None = None) -> list[Path]:
    """Make the folders that are missing; gives those that were made, the outermost first. All or none."""
    made: list[Path] = []
    try:
        _make(folder, disk or Disk(), made)
    except BaseException:
        remove_empty(made)
        raise
    return made


def _make(folder: Path, disk: Disk, made: list[Path]) -> None:
    missing: list[Path] = []  # thousands, perhaps
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for parent in reversed(missing):
        if parent.exists():  # ``new/../new`` is, once ``new`` is there
            continue
        try:
            disk.make_directory(parent)
        except FileExistsError:
            if parent.is_dir():  # another process made it just now
                continue
            raise
        made.append(parent)
        disk.sync_directory(parent.parent)


def remove_empty(made: Sequence[Path]) -> None:
    """Remove what ``make_parents`` made, but for a folder in which somebody else put a file."""
    for folder in reversed(made):
        with suppress(OSError):
            folder.rmdir()
