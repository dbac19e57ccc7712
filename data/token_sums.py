"""Keep checksums of a token file's blocks, to check the bytes of a batch at the moment they are read.

``<name>.sums`` holds the CRC-32 of each 64 KiB of the tokens and then of the targets, as little-endian
uint32. A hash of the whole file would need the whole file to be read at every start; these checksums cost one
pass over each block that is read.
"""

import hashlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..parallel_state import BadInput, require
from ..storage.crc import crc32

#: Bytes with one checksum: less than what a system reads ahead, so that checking reads little more.
BLOCK = 2**16

Sums = NDArray[np.uint32]


class FileHashes:
    """Compute a file's SHA-256 and the checksums of its blocks from its bytes as they come."""

    def __init__(self) -> None:
        self.sha256, self._done, self._last, self._filled = hashlib.sha256(), array("I"), 0, 0

    def update(self, data: bytes | memoryview) -> None:
        self.sha256.update(data)
        data, at = memoryview(data).cast("B"), 0
        while at < len(data):
            part = data[at : at + BLOCK - self._filled]
            self._last = crc32(part, self._last)
            self._filled += len(part)
            at += len(part)
            if self._filled == BLOCK:
                self._done.append(self._last)
                self._last = self._filled = 0

    def sums(self) -> Sums:
        """Return the checksums of the bytes so far; the last block may be incomplete."""
        sums = [*self._done, self._last] if self._filled else self._done
        return np.array(sums, dtype="<u4")


class CheckedFile:
    """Map a file of numbers below ``limit``, the ``legal`` ones in words. Each block is compared with its
    checksum when it is first read, the first and the last one at once.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], sums: Sums, limit: int, legal: str) -> None:
        self.path, self.items, self._sums = path, np.memmap(path, dtype, mode="r"), sums
        self._limit, self._legal, self._bytes = limit, legal, self.items.view(np.uint8)
        self._checked = np.zeros(block_count(self.items.nbytes), dtype=bool)
        for block in (0, len(self._checked) - 1):
            self._check(block)

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Return items ``begin`` to ``end``; ``BadInput`` if they are not what was written, or not legal."""
        if end > begin:
            size = self.items.itemsize
            first, last = begin * size // BLOCK, -(-end * size // BLOCK)
            for block in np.flatnonzero(~self._checked[first:last]) + first:
                self._check(int(block))
        items: NDArray[Any] = self.items[begin:end]
        if items.size and items.max() >= self._limit:
            at = int(np.argmax(items >= self._limit))
            todo = "The file was changed after it was made: tokenize again"
            raise BadInput(self.path, f"token {begin + at}", expected=self._legal, found=items[at], todo=todo)
        return items

    def verify(self, sha256: str, progress: Callable[[int], None]) -> None:
        """Read all items, and compare their SHA-256 too; ``progress`` is called with numbers of bytes."""
        digest = hashlib.sha256()
        for start in range(0, len(self.items), 2**22):
            part = self.read(start, start + 2**22)
            progress(part.nbytes)
            digest.update(np.ascontiguousarray(part).data)
        require(digest.hexdigest() == sha256, self.path, "sha256", sha256, digest.hexdigest())

    def _check(self, block: int) -> None:
        checksum = crc32(self._bytes[block * BLOCK : (block + 1) * BLOCK].data)
        if checksum != self._sums[block]:
            expected = f"the CRC-32 {int(self._sums[block]):08x} that they were written with"
            todo = "The file was changed after it was made: copy it again, or tokenize again"
            place = f"bytes {block * BLOCK} to {min((block + 1) * BLOCK, len(self._bytes)) - 1}"
            raise BadInput(self.path, place, expected=expected, found=f"{checksum:08x}", todo=todo)
        self._checked[block] = True


def block_count(size: int) -> int:
    """Return how many checksums a file of ``size`` bytes has."""
    return -(-size // BLOCK)
