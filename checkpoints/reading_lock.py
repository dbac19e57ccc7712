"""Keep a checkpoint from being deleted while it is read: readers lock its directory, retention checks the
lock.

A run with ``keep = 1`` deletes a checkpoint as soon as the next one is committed, even if another process is
reading it. The lock is the operating system's (flock); several readers may share it, and it ends with the
process. On a file system without such locks a reader may get an error because files were deleted.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..parallel_state import BadCheckpoint
from ..storage.lock import try_lock


class Hold:
    """Keep retention away from a directory as long as this object lives, or until ``release``."""

    def __init__(self, fd: int) -> None:
        self._finalizer = weakref.finalize(self, os.close, fd)

    def release(self) -> None:
        """Release the directory now."""
        self._finalizer()


def hold(directory: Path) -> Hold:
    """Lock a directory against deletion; ``BadCheckpoint`` if it is being deleted or does not exist."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadCheckpoint(directory, expected="a checkpoint", found=reason) from None
    lock = Hold(fd)
    with suppress(OSError):  # no such locks here
        if not try_lock(fd, shared=True):
            raise BadCheckpoint(directory, expected="a checkpoint", found="one that is being deleted")
    return lock


@contextmanager
def nobody_reads(directory: Path) -> Iterator[bool]:
    """Yield whether nobody holds the directory; if so, nobody else can hold it during the ``with`` block."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        free = True
        with suppress(OSError):
            free = try_lock(fd)
        yield free
    finally:
        os.close(fd)
