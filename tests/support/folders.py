"""Hash the files of a folder, and count the bytes that are read of them."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


def contents(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder, by its path there."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@contextmanager
def bytes_read(folder: Path) -> Iterator[Counter[str]]:
    """Count, in the ``with`` block, the bytes that ``os.preadv`` reads of each file below a folder."""
    read, counts, root = os.preadv, Counter[str](), str(folder.resolve()).rstrip("/") + "/"

    def count(fd: int, buffers: Sequence[Any], at: int) -> int:
        done = read(fd, buffers, at)
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.startswith(root):
            counts[path.removeprefix(root)] += done
        return done

    with mock.patch("os.preadv", count):
        yield counts
