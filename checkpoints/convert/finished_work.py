"""Note which pieces of a conversion are on the disk already, so that they are not made again after a kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock

from ...parallel_state import fault
from ...storage.disk import Disk
from ...storage.journal import Journal

JOURNAL = "journal.jsonl"

#: Bytes after which what was written is synced and noted: a kill costs at most about so much work.
EVERY = 1 << 30


class FinishedWork:
    """Keep a journal of the pieces of work whose bytes are on the disk. Several threads may use it at once.

    ``done``: for the number of each piece, the CRC-32 of each tensor that it wrote. Before a piece counts as
    done, these sums are compared with the files. ``sync`` flushes everything written so far to the disk; it
    is called after every ``sync_interval`` bytes.
    """

    def __init__(
        self, path: Path, sync: Callable[[], None], *, sync_interval: int = EVERY, disk: Disk | None = None
    ):
        self._journal = Journal(path, list[tuple[int, list[int]]], disk=disk)
        self.done = {number: sums for record in self._journal.records for number, sums in record}
        self._sync, self._interval = sync, sync_interval
        self._pending: list[tuple[int, Callable[[], list[int]]]] = []
        self._bytes = 0
        self._lock = Lock()

    def note(self, number: int, nbytes: int, sums: Callable[[], list[int]]) -> None:
        """Note that a piece of work was written; a later call flushes it to the disk and records its sums."""
        with self._lock:
            self._pending.append((number, sums))
            self._bytes += nbytes
            if self._bytes < self._interval:
                return
            finished, self._pending, self._bytes = self._pending, [], 0
            self._sync()
            self._journal.add([(number, read()) for number, read in finished])
            fault("convert.noted", rank=0)
