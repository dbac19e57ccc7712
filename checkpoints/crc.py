"""CRC-32 of a file whose pieces are seen in any order, by any thread: checksums are combined, not re-read.

The polynomial arithmetic is zlib's ``crc32_combine`` (Mark Adler), which Python's ``zlib`` does not offer.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

try:
    from isal.isal_zlib import crc32  # Intel's library: five to eight times zlib's speed here, the same sums
except ImportError:  # a processor for which there is none
    from zlib import crc32

_POLYNOMIAL = 0xEDB88320
_READ = 4 << 20


def combine(first: int, second: int, second_length: int) -> int:
    """The CRC-32 of two stretches of bytes in a row, from that of each and the second's length."""
    return _multiply(_power(second_length), first) ^ second


class Checksum:
    """Collects the CRC-32 of stretches of one file. Safe to use from several threads at once."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, int], int] = {}

    def add(self, offset: int, data: bytes | memoryview, crc: int | None = None) -> int:
        """Count in the bytes that lie at ``offset``; their CRC-32, computed unless it is given.

        The same stretch twice counts once.
        """
        crc = crc32(data) if crc is None else crc
        self._pieces[offset, len(data)] = crc
        return crc

    def gaps(self, size: int) -> list[tuple[int, int]]:
        """The ``(offset, length)`` of what was not seen of a file of ``size`` bytes."""
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
    ) -> None:
        """Read from the file what was not seen of these ``(begin, end)``, which lie end to end from 0."""
        buffer = memoryview(bytearray(_READ))
        for gap, length in self.gaps(stretches[-1][1]):
            for begin, end in stretches:
                stop = min(end, gap + length)
                for at in range(max(begin, gap), stop, _READ):
                    piece = buffer[: os.preadv(fd, [buffer[: min(_READ, stop - at)]], at)]
                    self.add(at, piece)
                    progress(len(piece))

    def value(self, size: int) -> int:
        """The CRC-32 of all ``size`` bytes; there must be no gaps."""
        return self.of([(0, size)])[0]

    def of(self, stretches: Iterable[tuple[int, int]]) -> list[int]:
        """The CRC-32 of each ``(begin, end)``, in order. No piece lies across an end; where bytes are missing
        (a file cut short while it was read) the sum is that of the others.
        """
        found, pieces = [], deque(self._in_order())
        for _, end in stretches:
            crc = 0
            while pieces and pieces[0][0] < end:
                _, length, piece = pieces.popleft()
                crc = combine(crc, piece, length)
            found.append(crc)
        return found

    def _in_order(self) -> Iterator[tuple[int, int, int]]:
        """Stretches that do not overlap: of two that do, the later is left out and becomes a gap."""
        at = 0
        for (offset, length), crc in sorted(self._pieces.items()):
            if offset >= at and length:
                yield offset, length, crc
                at = offset + length


@cache
def _power(length: int) -> int:
    """X to the power ``8 * length``, modulo the polynomial."""
    result, square = 1 << 31, 1 << 23  # 1, and x^8
    while length:
        if length & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        length >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, modulo the polynomial, in zlib's reflected bit order."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product
