"""Write one safetensors file whose tensors are known beforehand, in boxes that arrive in any order."""

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from ..parallel_state import Box
from .crc import Checksum
from .disk import Disk, DiskFailed, writing
from .dtypes import TORCH
from .safetensors_header import build_header
from .strict_json import StoredFile
from .strides import runs_of

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

#: Bytes that are summed and written at once: the sum brings them into the cache, to be written from there.
_PIECE = 4 << 20


class TensorWriter:
    """Write a new safetensors file. ``close`` returns when every byte is on the disk.

    ``tensors``: for each name its ``(dtype, shape)``, the dtype by safetensors' name. ``entries``: where each
    tensor lies. Boxes may come from several threads; each element must come exactly once. With ``again`` the
    file may exist, left by a killed process; ``take`` says which tensors it holds already. With ``overlap`` a
    thread computes the checksum while the bytes are written; the tensors must then stay until ``close``.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        *,
        metadata: Mapping[str, str] | None = None,
        again: bool = False,
        overlap: bool = False,
    ):
        header, self.entries = build_header(tensors, metadata or {})
        self.path = path
        self.size = len(header) + sum(entry.nbytes for entry in self.entries.values())
        self._checksum = Checksum(apart=(entry.begin for entry in self.entries.values()))
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(1, "checksum") if overlap else None
        self._sums: list[Future[int]] = []
        self._missing = {name: prod(entry.shape) for name, entry in self.entries.items()}
        with writing(path):
            self._fd = Disk().reopen(path) if again and path.exists() else Disk().create(path)
        self._write(np.frombuffer(header, np.uint8), 0)

    def write(self, name: str, box: Box, tensor: torch.Tensor, crc: int | None = None) -> None:
        """Write ``tensor``, a CPU tensor of the box's shape and the stored dtype, at ``box`` of ``name``.

        A box that is one run of bytes costs one call to the system. Its checksum is computed from memory,
        unless the caller knows it: ``crc``. Other boxes cost a call a run, and ``close`` reads them again.
        """
        entry = self.entries[name]
        assert tensor.dtype == TORCH[entry.dtype] and tensor.shape == box.shape, (name, box, tensor.shape)
        data, at = tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), 0
        for runs in runs_of(entry.shape, box, tensor.element_size()):
            for row in range(runs.rows):
                offset = entry.begin + runs.offset + row * runs.stride
                if runs.length == data.size and crc is not None:
                    self._checksum.note(offset, data.size, crc)
                    self._put(data, offset)
                elif runs.rows == 1:
                    self._write(data[at : at + runs.length], offset)
                else:
                    self._put(data[at : at + runs.length], offset)
                at += runs.length
        self._count(name, box.size)

    def sum_of(self, name: str) -> int:
        """Return the CRC-32 of a tensor's bytes: as they were written, or else as they are in the file."""
        entry, checksum = self.entries[name], self._checksum
        if checksum.gaps(entry.begin, entry.end):
            checksum = Checksum()  # of its own: what a killed process wrote may be written again
            for _ in checksum.read_gaps(self._fd, (entry.begin, entry.end)):
                pass
        return checksum.of(entry.begin, entry.end)

    def take(self, name: str, crc: int) -> None:
        """Note that the file holds the whole tensor already, with this ``sum_of``."""
        entry = self.entries[name]
        self._checksum.note(entry.begin, entry.nbytes, crc)
        self._count(name, prod(entry.shape))

    def sync(self, *, evict: bool = False) -> None:
        """Flush to the disk what was written so far; ``evict`` drops it from the page cache, too."""
        with writing(self.path):
            Disk().sync(self._fd)
        if evict and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> StoredFile:
        """Flush the file to the disk and return its name, size and checksum."""
        missing = {name: count for name, count in self._missing.items() if count}
        assert not missing, f"{self.path}: elements not written exactly once: {missing}"
        file_size = os.fstat(self._fd).st_size
        if file_size != self.size:
            raise DiskFailed(f"{self.path}: {self.size:,} bytes were written, {file_size:,} are there")
        for future in self._sums:
            future.result()
        for _ in self._checksum.read_gaps(self._fd, (0, self.size)):
            pass
        if gaps := self._checksum.gaps(0, self.size):
            raise DiskFailed(f"{self.path}: what was written cannot be read from byte {gaps[0][0]:,} on")
        self.sync()
        self.abandon()
        return StoredFile(name=self.path.name, size=self.size, crc32=self._checksum.of(0, self.size))

    def abandon(self) -> None:
        """Close the file descriptor and leave the file as it is."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _count(self, name: str, elements: int) -> None:
        with self._lock:
            self._missing[name] -= elements

    def _write(self, data: Bytes, offset: int) -> None:
        """Sum up and write bytes that follow one another."""
        for at in range(0, data.size, _PIECE):
            piece = data[at : at + _PIECE]
            if self._pool is not None:
                self._sums.append(self._pool.submit(self._checksum.add, offset + at, piece.data))
            else:
                self._checksum.add(offset + at, piece.data)
            self._put(piece, offset + at)

    def _put(self, data: Bytes, offset: int) -> None:
        with writing(self.path):
            Disk().write(self._fd, data.data, offset)
