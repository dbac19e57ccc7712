"""Read the blocks of a job, and hash everything read up to each block."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator

from .text_and_jsonl import Block


class Reading(Iterator[tuple[int, Block]]):
    """Iterate over ``blocks``, each with how many bytes have been read, and hash them."""

    def __init__(self, blocks: Iterator[tuple[int, Block]]) -> None:
        self._blocks, self._digest = blocks, hashlib.sha256()
        self._hashes: deque[str] = deque()

    def __next__(self) -> tuple[int, Block]:
        done, block = next(self._blocks)
        data = block.data if isinstance(block.data, bytes) else repr(block.data).encode()
        self._digest.update(f"{block.path}\0{block.kind}\0{block.first}\0{len(data)}\0".encode())
        self._digest.update(data)
        self._hashes.append(self._digest.hexdigest())
        return done, block

    def hash_of_next(self) -> str:
        """Return the hash of all blocks up to the oldest one whose hash was not asked for yet."""
        return self._hashes.popleft()

    def past(self, portions: int, read: str) -> bool:
        """Skip so many blocks; return whether they exist and have the hash ``read``."""
        for _ in range(portions):
            if next(self, None) is None:
                return False
        hashes = [self.hash_of_next() for _ in range(portions)]
        return not hashes or hashes[-1] == read
