"""Record which parts of a long job are on the disk, so that after a kill the job continues.

A line of the journal is a record in JSON and the CRC-32 of that text. It is written after the data that it
describes is on the disk. A job that continues compares the records with the files themselves.
"""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from ..parallel_state import fault
from .crc import crc32
from .disk import Disk, writing

Record = TypeVar("Record")


class Journal(Generic[Record]):
    """Write and read a file of records.

    ``records`` has those of an earlier run, in order, up to the first line that is not whole; the file is cut
    off there.
    """

    def __init__(self, path: Path, record: type[Record], *, disk: Disk | None = None) -> None:
        self._path, self._disk = path, disk or Disk()
        self._adapter = TypeAdapter(record)
        self.records: list[Record] = []
        self._length = 0
        self._read()

    def add(self, record: Record) -> None:
        """Write a record; it is on the disk when this returns."""
        text = self._adapter.dump_json(record)
        line = text + b" %08x\n" % crc32(text)
        with writing(self._path):
            fd = self._disk.reopen(self._path) if self._path.exists() else self._disk.create(self._path)
            try:
                self._disk.write(fd, memoryview(line), self._length)
                self._disk.sync(fd)
            finally:
                self._disk.close(fd)
        self._length += len(line)
        self.records.append(record)

    def clear(self) -> None:
        """Delete all records, because they do not describe the files."""
        self._path.unlink(missing_ok=True)
        self.records, self._length = [], 0

    def _read(self) -> None:
        if not self._path.exists():
            return
        for line in self._path.read_bytes().splitlines(keepends=True):
            text, _, crc = line.rpartition(b" ")
            try:
                if crc != b"%08x\n" % crc32(text):
                    break
                self.records.append(self._adapter.validate_json(text, strict=True))
            except ValidationError:
                break
            self._length += len(line)
        os.truncate(self._path, self._length)


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
