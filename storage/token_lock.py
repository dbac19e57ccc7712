"""One writer of a token file at a time: a lock that the system frees however its holder ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ..parallel_state import BadInput


def take(partial: Path) -> int:
    """Make the folder and hold the lock in it; the descriptor to close.

    ``BadInput`` where another holds it.
    """
    while True:
        partial.mkdir(exist_ok=True)
        try:
            lock = os.open(partial / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # another writer cleared the folder just now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(lock), os.stat(partial / "lock"))
        except BlockingIOError:
            os.close(lock)
            raise BadInput(
                partial,
                expected="no other writer",
                found="one at work",
                todo="Wait for it or choose another name",
            ) from None
        except FileNotFoundError:
            same = False
        if same:
            return lock
        os.close(lock)  # a lock on a file that is no longer in the folder holds nothing
