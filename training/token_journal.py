"""What a writer of tokens that was killed leaves to the next one, so that nothing finished is done again.

The journal is a file of JSON lines. The first names the job; each other says how long every file was, in
bytes, when so many portions of the input were finished, and is written when those bytes are on the disk. What
lies behind the last of them is cut off when the job is taken up.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..checkpoints.plain_files import read_small
from ..parallel_state import BadInput

#: A journal of more is not one of ours. Unit: bytes.
_LARGEST = 2**26


@dataclass(frozen=True, slots=True)
class Mark:
    """So many portions of the input are finished, of which so many samples were left out and so many learn no
    end mark; and then the files had these sizes.
    """

    portions: int
    left_out: int
    unended: int
    sizes: Mapping[str, int]


class Journal:
    """``path`` for the job named ``job``; ``every``: seconds between lines, as each waits for the disk."""

    def __init__(self, path: Path, job: str, *, every: float) -> None:
        self._path, self._job, self._every = path, job, every
        self._file: BinaryIO | None = None
        self._last = time.monotonic()

    def begin(self) -> Mark | None:
        """The last mark of the same job, whose files are as long as it says; else None, and a new journal."""
        mark = self._found()
        self._file = self._path.open("ab" if mark else "wb")
        if mark is None:
            self._write({"job": self._job})
        else:
            self._file.write(b"\n")  # ends a line that was cut short, if there was one
        return mark

    @property
    def marked(self) -> bool:
        """Whether there is something to go on from."""
        return self._found() is not None

    def mark(self, portions: int, left_out: int, unended: int, files: Mapping[str, BinaryIO]) -> None:
        """Note that so many portions are finished, unless the last note is too young."""
        if time.monotonic() - self._last < self._every:
            return
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in files.items()}
        self._write({"portions": portions, "left_out": left_out, "unended": unended, "sizes": sizes})
        self._last = time.monotonic()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, object]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _found(self) -> Mark | None:
        try:
            lines = read_small(self._path, _LARGEST).split(b"\n")
        except BadInput:  # absent, or not a journal of ours
            return None
        if _parse(lines[0]) != {"job": self._job}:
            return None
        for line in reversed(lines[1:]):
            mark = _mark(_parse(line))
            if mark is not None and all(_held(self._path.parent / n) >= s for n, s in mark.sizes.items()):
                return mark
        return None


def _parse(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _mark(line: object) -> Mark | None:
    match line:
        case {
            "portions": int(portions),
            "left_out": int(left_out),
            "unended": int(unended),
            "sizes": dict(sizes),
        }:
            return Mark(portions, left_out, unended, sizes) if _all_whole(sizes) else None
    return None


def _all_whole(sizes: dict[object, object]) -> bool:
    return all(isinstance(size, int) for size in sizes.values())


def _held(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
