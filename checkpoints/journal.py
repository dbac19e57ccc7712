"""What of a long conversion is on the disk already, so that after a kill it goes on instead of beginning."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from ..parallel_state import fault
from .disk import Disk, writing

JOURNAL = "journal.jsonl"

#: Bytes after which what was written is synced and noted: a kill costs at most about so much work.
EVERY = 1 << 30


class Journal:
    """A file of lines, each a list of numbers: pieces of work whose bytes were synced before the line was
    written.

    ``sync`` puts what was written so far on the disk. Safe to use from several threads at once.
    """

    def __init__(self, path: Path, sync: Callable[[], None], *, every: int = EVERY, disk: Disk | None = None):
        self.done, self._length = _read(path)
        self._path, self._sync, self._every, self._disk = path, sync, every, disk or Disk()
        self._pending: list[int] = []
        self._bytes = 0
        self._lock = Lock()

    def note(self, number: int, nbytes: int) -> None:
        """A piece of work was written; its number reaches the disk with some later call."""
        with self._lock:
            self._pending.append(number)
            self._bytes += nbytes
            if self._bytes < self._every:
                return
            finished, self._pending, self._bytes = self._pending, [], 0
            self._sync()
            with writing(self._path):
                fd = self._disk.reopen(self._path) if self._path.exists() else self._disk.create(self._path)
                try:
                    line = json.dumps(finished).encode() + b"\n"
                    self._disk.write(fd, memoryview(line), self._length)
                    self._disk.sync(fd)
                    self._length += len(line)
                finally:
                    self._disk.close(fd)
            fault("convert.noted", rank=0)


def _read(path: Path) -> tuple[set[int], int]:
    """The numbers of all whole lines and their bytes; what a kill cut short is cut off."""
    done: set[int] = set()
    length = 0
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                numbers = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                numbers = None
            if not isinstance(numbers, list):
                break
            done.update(numbers)
            length += len(line)
        os.truncate(path, length)
    return done, length
