"""Keep checksums of a token file's blocks, to check the bytes of a batch at the moment they are read.

``<name>.sums`` holds the CRC-32 of each 64 KiB of the tokens and then of the targets, as little-endian
uint32. A hash of the whole file would need the whole file to be read at every start; these checksums cost one
pass over each block that is read.
"""

import hashlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..parallel_state import BadInput
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
    """Map a file; compare each block with its checksum when it is first read, the first and last at once."""

    def __init__(self, path: Path, dtype: np.dtype[Any], sums: Sums) -> None:
        self.path, self.items, self._sums = path, np.memmap(path, dtype, mode="r"), sums
        self._bytes = self.items.view(np.uint8)
        self._checked = np.zeros(block_count(self.items.nbytes), dtype=bool)
        for first in (0, len(self.items) - 1):
            self.read(first, first + 1)

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Return items ``begin`` to ``end``; ``BadInput`` if they are not what was written."""
        if end > begin:
            size = self.items.itemsize
            first, last = begin * size // BLOCK, -(-end * size // BLOCK)
            for block in np.flatnonzero(~self._checked[first:last]) + first:
                self._check(int(block))
        items: NDArray[Any] = self.items[begin:end]
        return items

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
