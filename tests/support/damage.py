"""Damage a file as a disk, a copy that stopped or a lost write does; each call changes the file's bytes."""

from __future__ import annotations

from pathlib import Path


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


def swap_blocks(path: Path, first: int, second: int, size: int) -> None:
    """Exchange two blocks of ``size`` bytes at these offsets, which do not overlap."""
    assert abs(first - second) >= size
    raw = path.read_bytes()
    one, other = raw[first : first + size], raw[second : second + size]
    _replace(path, first, other)
    _replace(path, second, one)


def zero_page(path: Path, at: int, size: int = 4096) -> None:
    """Zero ``size`` bytes from an offset on, or what the file has of them."""
    _replace(path, at, bytes(min(size, path.stat().st_size - at)))
