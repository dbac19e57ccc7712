"""Writing one safetensors file whose tensors are known beforehand, in boxes that arrive in any order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from ..parallel_state import Box
from .crc import Checksum
from .disk import Disk, writing
from .dtypes import TORCH
from .strides import runs_of
from .tensor_header import Entry, build_header

_REREAD = 4 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """A finished file: its bytes and their CRC-32."""

    size: int
    crc: int


class TensorWriter:
    """A new safetensors file. ``close`` returns once every byte is on the disk.

    ``tensors`` maps each name to ``(dtype, shape)``, the dtype by the format's name. ``entries`` says where
    each lies. Boxes may come from several threads; each element must come exactly once.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        *,
        metadata: Mapping[str, str] | None = None,
        disk: Disk | None = None,
    ):
        header, self.entries = build_header(tensors, metadata or {})
        self.path = path
        self.size = len(header) + sum(entry.nbytes for entry in self.entries.values())
        self._disk = disk or Disk()
        self._checksum = Checksum()
        self._lock = Lock()
        self._missing = {name: prod(entry.shape) for name, entry in self.entries.items()}
        with writing(path):
            self._fd = self._disk.create(path)
        self._write(np.frombuffer(header, np.uint8), 0)

    def write(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        """Put ``tensor``, a CPU tensor of the box's shape and the stored dtype, at ``box`` of ``name``.

        A box that is one run of bytes costs one call to the system; its checksum is taken from memory.
        Others cost a call a run and are read once more by ``close``.
        """
        entry: Entry = self.entries[name]
        assert tensor.dtype == TORCH[entry.dtype] and tensor.shape == box.shape, (name, box, tensor.shape)
        if box.size == 0:
            return
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        at = 0
        for runs in runs_of(entry.shape, box, tensor.element_size()):
            for row in range(runs.rows):
                offset = entry.begin + runs.offset + row * runs.stride
                self._write(data[at : at + runs.length], offset, sum_now=runs.rows == 1)
                at += runs.length
        with self._lock:
            self._missing[name] -= box.size

    def close(self) -> Written:
        """Flush to the disk and give the size and checksum of the file."""
        left = {name: count for name, count in self._missing.items() if count}
        assert not left, f"{self.path}: elements not written exactly once: {left}"
        for offset, length in self._checksum.gaps(self.size):
            for at in range(offset, offset + length, _REREAD):
                piece = os.pread(self._fd, min(_REREAD, offset + length - at), at)
                self._checksum.add(at, piece)
        with writing(self.path):
            self._disk.sync(self._fd)
        self.abandon()
        return Written(self.size, self._checksum.value(self.size))

    def abandon(self) -> None:
        """Give the descriptor back and leave the file as it is."""
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _write(
        self, data: np.ndarray[tuple[int], np.dtype[np.uint8]], offset: int, sum_now: bool = True
    ) -> None:
        with writing(self.path):
            self._disk.write(self._fd, data.data, offset)
        if sum_now:
            self._checksum.add(offset, data.data)
