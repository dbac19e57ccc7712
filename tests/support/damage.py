"""Damage a file as a disk, a copy that stopped or a lost write does, or anyhow; see how it is read then."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from trilith.parallel_state import BadInput

#: What no reader does, whatever a file says.
FORBIDDEN = ("exec", "os.system", "subprocess.Popen", "pickle.find_class")


def _replace(path: Path, at: int, new: bytes) -> None:
    """Overwrite bytes in place, as damage does: the inode and the size stay."""
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(len(new))
        assert len(old) == len(new), f"{path} ends before byte {at + len(new)}"
        assert old != new, f"{path} has these bytes at {at} already"
        file.seek(at)
        file.write(new)


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    """Flip a bit of the byte at an offset; a negative one counts from the end, -1 being the last byte."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        begin = at if at >= 0 else size + at
        assert 0 <= begin < size, f"{path} has {size} bytes, none at {at}"
        file.seek(begin)
        (byte,) = file.read(1)
    _replace(path, begin, bytes([byte ^ 1 << bit]))


def truncate(path: Path, size: int) -> None:
    """Cut a file to its first ``size`` bytes; with a negative size, that many less than it has."""
    whole = path.stat().st_size
    left = size if size >= 0 else whole + size
    assert 0 <= left < whole, f"{path} has {whole} bytes, no more than {left}"
    with path.open("r+b") as file:
        file.truncate(left)


@contextmanager
def audited(*names: str) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """Collect the events of Python's audit with these names, and their arguments, during the block."""
    events: list[tuple[str, tuple[Any, ...]]] = []
    active = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:  # which stays until the process ends
        if active and event in names:
            events.append((event, arguments))

    sys.addaudithook(hook)
    try:
        yield events
    finally:
        active = False


def damaged(raw: bytes, random: Random, most: int = 4) -> bytes:
    """Return bytes with one change or several: a byte, a piece out, in or twice, or the rest cut off."""
    data = bytearray(raw)
    for _ in range(random.randint(1, most)):
        at = random.randrange(len(data) + 1)
        span = random.randint(1, 12)
        match random.randrange(5):
            case 0:
                data[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                del data[at : at + span]
            case 2:
                data[at:at] = random.randbytes(span)
            case 3:
                data[at:at] = data[max(0, at - span) : at]
            case 4:
                data = data[: max(1, at)]
    return bytes(data)


def is_accepted(read: Callable[[Path], object], path: Path) -> bool:
    """Return whether a file is read; any error but ``BadInput``, or a second of computing, fails."""
    began = time.thread_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read(path)
            accepted = True
        except BadInput as error:
            accepted = False
            assert str(error).isprintable() and len(str(error)) < 2000, str(error)
    assert time.thread_time() - began < 1.0
    return accepted


def fuzz(
    read: Callable[[Path], object],
    path: Path,
    count: int,
    make: Callable[[], bytes],
    forbidden: tuple[str, ...] = FORBIDDEN,
) -> int:
    """Read a file with other content so often, and see nothing run or written; how often it was accepted."""
    accepted = 0
    with audited("open", *forbidden) as events:
        for _ in range(count):
            path.write_bytes(make())
            events.clear()
            accepted += is_accepted(read, path)
            flags = [arguments[2] if event == "open" else os.O_WRONLY for event, arguments in events]
            assert not [flag for flag in flags if isinstance(flag, int) and flag & (os.O_WRONLY | os.O_RDWR)]
    return accepted
