"""Compute the CRC-32 of a file whose pieces come in any order, from any thread, by combining their sums.

The polynomial arithmetic is zlib's ``crc32_combine`` (Mark Adler), which Python's ``zlib`` does not offer.
"""

import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from threading import Lock

try:
    from isal.isal_zlib import (
        crc32 as crc32,  # Intel's library: five to eight times zlib's speed here, the same sums
    )
except ImportError:  # a processor for which there is none
    from zlib import crc32 as crc32

_POLYNOMIAL = 0xEDB88320
_READ = 4 << 20


def combine(first: int, second: int, second_length: int) -> int:
    """Return the CRC-32 of two adjacent stretches of bytes, from that of each and the second's length."""
    return _multiply(_power(second_length), first) ^ second


def crc_of(fd: int, begin: int, end: int) -> int:
    """Return the CRC-32 of these bytes of a file, or of as many of them as it has."""
    crc, at, buffer = 0, begin, memoryview(bytearray(min(_READ, end - begin)))
    while at < end and (read := os.preadv(fd, [buffer[: min(_READ, end - at)]], at)):
        crc = crc32(buffer[:read], crc)
        at += read
    return crc


class Checksum:
    """Collect the CRC-32 of stretches of one file. Safe to use from several threads at once.

    A stretch that begins where another ends is joined to it, so that memory does not grow with the file.
    Stretches are not joined across the offsets ``apart``, because sums between these are asked for later.
    """

    def __init__(self, apart: Iterable[int] = ()) -> None:
        self._apart = frozenset(apart)
        self._begins: list[int] = []  # of the pieces, in order
        self._pieces: list[tuple[int, int]] = []  # the length and sum of each
        self._lock = Lock()

    def add(self, offset: int, data: bytes | memoryview, crc: int | None = None) -> int:
        """Count in the bytes that lie at ``offset``; their CRC-32, computed unless it is given.

        The same stretch twice counts once.
        """
        crc = crc32(data) if crc is None else crc
        if len(data):
            with self._lock:
                self._insert(offset, len(data), crc)
        return crc

    def known(self, offset: int, length: int, crc: int) -> None:
        """Count in a stretch whose sum is known already."""
        if length:
            with self._lock:
                self._insert(offset, length, crc)

    def _insert(self, offset: int, length: int, crc: int) -> None:
        """Add a stretch, unless it overlaps a known one: then it may become a gap and be read again."""
        at = bisect_right(self._begins, offset)
        if at < len(self._begins) and self._begins[at] < offset + length:
            return
        if at:
            begin, (before, first) = self._begins[at - 1], self._pieces[at - 1]
            if begin + before > offset:
                return
            if begin + before == offset and offset not in self._apart:
                self._pieces[at - 1] = before + length, combine(first, crc, length)
                return
        self._begins.insert(at, offset)
        self._pieces.insert(at, (length, crc))

    def between(self, begin: int, end: int) -> int | None:
        """Return the CRC-32 of these bytes; ``None`` if some were not seen, or a stretch crosses an end."""
        with self._lock:
            at, crc = bisect_left(self._begins, begin), 0
            while begin < end and self._begins[at : at + 1] == [begin]:
                length, piece = self._pieces[at]
                crc, begin, at = combine(crc, piece, length), begin + length, at + 1
        return crc if begin == end else None

    def gaps(self, size: int) -> list[tuple[int, int]]:
        """Return the ``(offset, length)`` of each part of a file of ``size`` bytes that was not seen."""
        missing, at = [], 0
        for offset, length, _ in self._in_order():
            if offset > at:
                missing.append((at, offset - at))
            at = offset + length
        return [*missing, (at, size - at)] if at < size else missing

    def fill_gaps(
        self,
        fd: int,
        stretches: Sequence[tuple[int, int]],
        progress: Callable[[int], None] = lambda read: None,
        also: Callable[[memoryview], None] = lambda data: None,
    ) -> None:
        """Read the unseen parts of these ``(begin, end)``, which are in order and do not overlap. ``also`` is
        given what is read, in order.
        """
        buffer = memoryview(bytearray(_READ))
        gaps = deque(self.gaps(stretches[-1][1]))
        for begin, end in stretches:
            while gaps and gaps[0][0] < end:
                gap, length = gaps[0]
                stop, at = min(end, gap + length), max(begin, gap)
                while at < stop and (read := os.preadv(fd, [buffer[: min(_READ, stop - at)]], at)):
                    self.add(at, buffer[:read])
                    also(buffer[:read])
                    progress(read)
                    at += read
                if gap + length > end:
                    break  # the rest of the gap may belong to the next stretch
                gaps.popleft()

    def value(self, size: int) -> int:
        """Return the CRC-32 of all ``size`` bytes; there must be no gaps."""
        assert not self.gaps(size), self.gaps(size)
        return self.of([(0, size)])[0]

    def of(self, stretches: Iterable[tuple[int, int]]) -> list[int]:
        """Return the CRC-32 of each ``(begin, end)``, in order.

        No piece may cross an end. If bytes are missing (the file was cut short while it was read), the sum is
        that of the others.
        """
        crcs, pieces = [], deque(self._in_order())
        for _, end in stretches:
            crc = 0
            while pieces and pieces[0][0] < end:
                _, length, piece = pieces.popleft()
                crc = combine(crc, piece, length)
            crcs.append(crc)
        return crcs

    def _in_order(self) -> Iterator[tuple[int, int, int]]:
        for offset, (length, crc) in zip(self._begins, self._pieces, strict=True):
            yield offset, length, crc


@lru_cache(maxsize=4096)
def _power(length: int) -> int:
    """Return x to the power ``8 * length``, modulo the polynomial."""
    result, square = 1 << 31, 1 << 23  # 1, and x^8
    while length:
        if length & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        length >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials, modulo the polynomial, in zlib's reflected bit order."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product
