"""Compute the CRC-32 of a file whose pieces come in any order, from any thread, by combining their sums.

The polynomial arithmetic is zlib's ``crc32_combine`` (Mark Adler), which Python's ``zlib`` does not offer.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from threading import Lock

from .safe_open import read_full

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


class Checksum:
    """Collect the CRC-32 of stretches of one file. Safe to use from several threads at once.

    A stretch that begins where another ends is joined to it, so that memory does not grow with the file.
    Stretches are not joined across the offsets ``apart``, because sums between these are asked for later.
    """

    def __init__(self, apart: Iterable[int] = ()) -> None:
        self.apart = frozenset(apart)
        self._begins: list[int] = []  # of the pieces, in order
        self._pieces: list[tuple[int, int]] = []  # the length and sum of each
        self._lock = Lock()

    def add(self, offset: int, data: bytes | memoryview) -> int:
        """Count in the bytes that lie at ``offset``, once if they come twice; return their CRC-32."""
        crc = crc32(data)
        self.note(offset, len(data), crc)
        return crc

    def note(self, offset: int, length: int, crc: int) -> None:
        """Count in a stretch whose sum is known already.

        One that overlaps a known one counts for nothing: it may then become a gap and be read again.
        """
        with self._lock:
            at = bisect_right(self._begins, offset)
            if not length or (at < len(self._begins) and self._begins[at] < offset + length):
                return
            if at:
                begin, (before, first) = self._begins[at - 1], self._pieces[at - 1]
                if begin + before > offset:
                    return
                if begin + before == offset and offset not in self.apart:
                    self._pieces[at - 1] = before + length, combine(first, crc, length)
                    return
            self._begins.insert(at, offset)
            self._pieces.insert(at, (length, crc))

    def gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the begin and the end of each part of these bytes that was not seen."""
        missing, at = [], begin
        with self._lock:
            for number in range(
                max(0, bisect_right(self._begins, begin) - 1), bisect_left(self._begins, end)
            ):
                if (offset := self._begins[number]) > at:
                    missing.append((at, offset))
                at = max(at, offset + self._pieces[number][0])
        return [*missing, (at, end)] if at < end else missing

    def read_gaps(self, fd: int, *stretches: tuple[int, int]) -> Iterator[tuple[int, memoryview]]:
        """Read the unseen parts of these ``(begin, end)``, in order, and yield where and what is read, before
        the next is. Of a file that was cut short, the rest stays a gap.
        """
        buffer = memoryview(bytearray(_READ))
        for stretch in stretches:
            for begin, end in self.gaps(*stretch):
                for at in range(begin, end, _READ):
                    data = buffer[: min(_READ, end - at)]
                    if read_full(fd, data, at) < len(data):
                        return
                    self.add(at, data)
                    yield at, data

    def of(self, begin: int, end: int) -> int:
        """Return the CRC-32 of what was seen of these bytes; no stretch may cross an end."""
        crc = 0
        for number in range(bisect_left(self._begins, begin), bisect_left(self._begins, end)):
            length, piece = self._pieces[number]
            crc = combine(crc, piece, length)
        return crc

    def between(self, begin: int, end: int) -> int | None:
        """Return the CRC-32 of these bytes; ``None`` if some were not seen, or a stretch crosses an end."""
        with self._lock:
            first, last = bisect_left(self._begins, begin), bisect_left(self._begins, end)
            seen = sum(length for length, _ in self._pieces[first:last])
            crosses = first < last and self._begins[last - 1] + self._pieces[last - 1][0] > end
            return self.of(begin, end) if seen == end - begin and not crosses else None


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
