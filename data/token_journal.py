"""Note what a writer of tokens has finished, so that after a kill the next one does not do it again."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from pydantic import TypeAdapter, ValidationError

from ..parallel_state import BadInput
from ..storage.regular import read_small

#: A journal of more is not one of ours. Unit: bytes.
_LARGEST = 2**26


@dataclass(frozen=True, slots=True)
class Mark:
    """So many portions of the input are finished, of which so many samples were left out and so many learn no
    end mark; and then the files had these sizes.

    ``read`` is the hash of these portions, ``written`` that of each file.
    """

    portions: int
    left_out: int
    unended: int
    sizes: Mapping[str, int]
    read: str = ""
    written: Mapping[str, str] = field(default_factory=dict)


_MARK = TypeAdapter(Mark)


class Journal:
    """``path`` for the job named ``job``; ``every``: seconds between lines, as each waits for the disk."""

    def __init__(self, path: Path, job: str, *, every: float) -> None:
        self._path, self._job, self._every = path, job, every
        self._file: BinaryIO | None = None
        self._last = time.monotonic()

    def begin(self) -> Mark | None:
        """The last mark of the same job, whose files are as long as it says; else None, and a new journal."""
        mark = self._found()
        self.close()
        self._file = self._path.open("ab" if mark else "wb")
        if mark is None:
            self._write({"job": self._job})
        else:
            self._file.write(b"\n")  # ends a line that was cut short, if there was one
        return mark

    @property
    def marked(self) -> bool:
        """Tell whether there is something to go on from."""
        return self._found() is not None

    def forget(self) -> None:
        """Drop the marks: what they say is not so."""
        self.close()
        self._file = self._path.open("wb")
        self._write({"job": self._job})

    @property
    def due(self) -> bool:
        """Tell whether the last mark is old enough for another."""
        return time.monotonic() - self._last >= self._every

    def mark(self, mark: Mark, files: Mapping[str, BinaryIO]) -> None:
        """Note what is finished, once the files are on the disk."""
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
        self._write(asdict(mark))
        self._last = time.monotonic()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, object]) -> None:
        assert self._file is not None
        text = json.dumps(line).encode()
        self._file.write(text + b" %08x\n" % zlib.crc32(text))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _found(self) -> Mark | None:
        try:
            lines = read_small(self._path, _LARGEST).split(b"\n")
        except BadInput:  # absent, or not a journal of ours
            return None
        if _whole(lines[0]) != json.dumps({"job": self._job}).encode():
            return None
        for line in reversed(lines[1:]):
            mark = _mark(_whole(line))
            if mark is not None and all(_held(self._path.parent / n) >= s for n, s in mark.sizes.items()):
                return mark
        return None


def _whole(line: bytes) -> bytes:
    """Return the text before the checksum if the checksum is right, otherwise nothing."""
    text, _, crc = line.rpartition(b" ")
    return text if crc == b"%08x" % zlib.crc32(text) else b""


def _mark(text: bytes) -> Mark | None:
    try:
        return _MARK.validate_json(text, strict=True)
    except ValidationError:
        return None


def _held(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
