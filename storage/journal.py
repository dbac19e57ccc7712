"""What of a long conversion is on the disk already, so that after a kill it goes on instead of beginning.

A line of the journal is a list of ``[number, [sum, ...]]``: the number of a piece of work, and the CRC-32 of
each tensor that it wrote. The sums are compared with what is in the files before a piece is taken as done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from pydantic import TypeAdapter, ValidationError

from ..parallel_state import fault
from .disk import Disk, writing

JOURNAL = "journal.jsonl"

#: Bytes after which what was written is synced and noted: a kill costs at most about so much work.
EVERY = 1 << 30

_LINE = TypeAdapter(list[tuple[int, list[int]]])


class Journal:
    """A file of the pieces of work whose bytes were on the disk before their line was written.

    ``done`` has the sums of each piece by its number, as they were noted. ``sync`` puts what was written so
    far on the disk. Safe to use from several threads at once.
    """

    def __init__(self, path: Path, sync: Callable[[], None], *, every: int = EVERY, disk: Disk | None = None):
        self.done, self._length = _read(path)
        self._path, self._sync, self._every, self._disk = path, sync, every, disk or Disk()
        self._pending: list[tuple[int, Callable[[], list[int]]]] = []
        self._bytes = 0
        self._lock = Lock()

    def note(self, number: int, nbytes: int, sums: Callable[[], list[int]]) -> None:
        """A piece of work was written; it reaches the disk with some later call, which asks for its sums."""
        with self._lock:
            self._pending.append((number, sums))
            self._bytes += nbytes
            if self._bytes < self._every:
                return
            finished, self._pending, self._bytes = self._pending, [], 0
            self._sync()
            noted = [[number, read()] for number, read in finished]
            with writing(self._path):
                fd = self._disk.reopen(self._path) if self._path.exists() else self._disk.create(self._path)
                try:
                    line = json.dumps(noted).encode() + b"\n"
                    self._disk.write(fd, memoryview(line), self._length)
                    self._disk.sync(fd)
                    self._length += len(line)
                finally:
                    self._disk.close(fd)
            fault("convert.noted", rank=0)


def _read(path: Path) -> tuple[dict[int, list[int]], int]:
    """The work of all whole lines, and the bytes of these; what a kill cut short is cut off."""
    done: dict[int, list[int]] = {}
    length = 0
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                done.update(_LINE.validate_json(line if line.endswith(b"\n") else b""))
            except ValidationError:
                break
            length += len(line)
        os.truncate(path, length)
    return done, length
