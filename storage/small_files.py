"""Read the small files that people and other programs write: text, JSON, TOML and lines of JSON.

This is the one reader for them. A file must be a regular file (a pipe or a device could make us wait for
ever), no larger than a limit, in UTF-8, and with one meaning: no key twice, no number that is not finite, no
deep nesting. Anything else is one line of ``BadInput`` that names the file.

A ``Journal`` says which parts of a long job are on the disk, so that after a kill the job continues. A line
of it is a record in JSON and the CRC-32 of that text. It is written after the data that it describes is on
the disk. A job that continues compares the records with the files themselves.
"""

import codecs
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from ..parallel_state import BadInput, fault
from .crc import crc32
from .disk import Disk, closing, writing
from .safe_open import read_small
from .strict_json import DEEPEST, decode_utf8, deeper, finite_float, parse_object, refuse_pointer

#: The most bytes of a file that a person writes by hand: a recipe, a template.
BY_HAND = 1 << 20
#: The most bytes of a configuration that a program writes.
CONFIGURATION = 16 << 20
#: The most bytes of a log that grows by a line a step, and of a file of prompts.
LOG = 1 << 30


def read_text(path: Path, limit: int = BY_HAND) -> str:
    """Read a text file. A byte order mark, which some editors put first, is left out."""
    raw = read_small(path, limit)
    refuse_pointer(raw, path)
    return decode_utf8(raw, path).removeprefix("\ufeff")


def read_json(path: Path, limit: int = CONFIGURATION) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    return parse_object(read_small(path, limit), path)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file in TOML."""
    return parse_toml(read_text(path), path)


def parse_toml(text: str, where: object) -> dict[str, Any]:
    """Parse TOML of at most ``DEEPEST`` nested levels; ``BadInput`` that names ``where`` and the line."""
    try:
        value = tomllib.loads(text, parse_float=finite_float)
        if deeper(value, DEEPEST):
            raise RecursionError
        return value
    except RecursionError:
        raise BadInput(where, expected=f"a depth of at most {DEEPEST} levels", found="more") from None
    except ValueError as error:  # TOMLDecodeError, our hook, and integers of thousands of digits
        raise BadInput(where, expected="TOML", found=str(error)) from None


@dataclass(frozen=True, slots=True)
class Line:
    """Hold one line of a file: its number from 1, and its JSON object or else what is wrong with it."""

    number: int
    text: str
    value: dict[str, Any] | None
    wrong: BadInput | None = None


def log_line(fields: Mapping[str, Any]) -> str:
    """Write a line of a log: a JSON object whose last field is the CRC-32 of all that stands before it."""
    body = json.dumps(fields)[:-1]
    return f'{body}, "crc32": "{crc32(body.encode()):08x}"}}'


def read_log(path: Path) -> Iterator[Line]:
    """Read lines as ``read_json_lines`` does, without their checksums; a line that does not match its own is
    a broken one. Lines of earlier releases have none.
    """
    for line in read_json_lines(path):
        if line.value is not None and "crc32" in line.value:
            body = line.text.encode().rpartition(b", ")[0]
            checksum, computed = line.value.pop("crc32"), f"{crc32(body):08x}"
            if checksum != computed:
                where, todo = f"{path}:{line.number}", "The line was altered or damaged"
                error = BadInput(where, "crc32", expected=checksum, found=computed, todo=todo)
                line = Line(line.number, line.text, None, error)
        yield line


def read_json_lines(path: Path, limit: int = LOG) -> Iterator[Line]:
    """Read a file of JSON objects, one a line. A line that is blank is left out; a line that is broken is
    given with what is wrong, so that the caller decides about it and the good lines after it are not lost.
    A byte order mark, which some editors put first, is left out.
    """
    for number, raw in enumerate(read_small(path, limit).removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not raw.strip():
            continue
        text = raw.decode("utf-8", errors="replace")
        try:
            yield Line(number, text, parse_object(raw, f"{path}:{number}"))
        except BadInput as error:
            yield Line(number, text, None, error)


def read_good_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a log, if it is there; lines that a kill or a full disk broke are left out."""
    if not path.exists():
        return []
    return [line.value for line in read_log(path) if line.value is not None]


Record = TypeVar("Record")


class Journal(Generic[Record]):
    """Write and read a file of records.

    ``records`` has those of an earlier run, up to the first line that is not whole; there the file is cut.
    """

    def __init__(self, path: Path, record: type[Record]) -> None:
        self._path = path
        self._adapter = TypeAdapter(record)
        self.records: list[Record] = []
        self._length = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            text, _, crc = line.rpartition(b" ")
            try:
                if crc != b"%08x\n" % crc32(text):
                    break
                self.records.append(self._adapter.validate_json(text, strict=True))
            except ValidationError:
                break
            self._length += len(line)
        if path.exists():
            os.truncate(path, self._length)

    def add(self, record: Record) -> None:
        """Write a record; it is on the disk when this returns."""
        text = self._adapter.dump_json(record)
        line = text + b" %08x\n" % crc32(text)
        disk = Disk()
        open_file = disk.reopen if self._path.exists() else disk.create
        with writing(self._path), closing(open_file(self._path)) as fd:
            disk.write(fd, memoryview(line), self._length)
            disk.sync(fd)
        self._length += len(line)
        self.records.append(record)

    def clear(self) -> None:
        """Delete all records, because they do not describe the files."""
        self._path.unlink(missing_ok=True)
        self.records, self._length = [], 0


JOURNAL = "journal.jsonl"

#: Bytes after which what was written is synced and noted: a kill costs at most about twice so much work.
EVERY = 1 << 29


class FinishedWork:
    """Keep a journal of the pieces of work whose bytes are on the disk. Several threads may use it at once.

    ``done``: for the number of each piece, the CRC-32 of each tensor that it wrote. Before a piece counts as
    done, these sums are compared with the files. ``sync`` flushes everything written so far to the disk; a
    thread calls it after every ``sync_interval`` bytes, while further work goes on.
    """

    def __init__(self, path: Path, sync: Callable[[], None], *, sync_interval: int = EVERY):
        self._journal = Journal(path, list[tuple[int, list[int]]])
        self.done = {number: sums for record in self._journal.records for number, sums in record}
        self._sync, self._interval = sync, sync_interval
        self._pending: list[tuple[int, Callable[[], list[int]]]] = []
        self._bytes = 0
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, "sync")
        self._syncing: Future[None] | None = None

    def note(self, number: int, nbytes: int, sums: Callable[[], list[int]]) -> None:
        """Note that a piece of work was written; a later call has it flushed and its sums recorded.

        Raises what the flush before raised.
        """
        with self._lock:
            self._pending.append((number, sums))
            self._bytes += nbytes
            if self._bytes < self._interval:
                return
            finished, self._pending, self._bytes = self._pending, [], 0
            self.wait()
            self._syncing = self._thread.submit(self._record, finished)

    def wait(self) -> None:
        """Wait until the last flush has ended. Raises what it raised."""
        if self._syncing is not None:
            self._syncing.result()

    def close(self) -> None:
        """Wait for the last flush, whatever it met, and end the thread."""
        self._thread.shutdown()

    def _record(self, finished: list[tuple[int, Callable[[], list[int]]]]) -> None:
        self._sync()
        self._journal.add([(number, read()) for number, read in finished])
        fault("convert.noted", rank=0)
