"""Read every byte of a file of tensors once, in order: its SHA-256, its own sums, and the numbers in it."""

import hashlib
import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..parallel_state import BadCheckpoint, Box
from .crc import Checksum
from .dtypes import BITS, TORCH
from .safetensors_reader import TensorFile
from .strides import contiguous

#: Bytes that are read at once; whole numbers of each dtype.
_WINDOW = 16 << 20


@dataclass
class _Region:
    """Hold the tensors whose bytes lie between these two offsets; several only if they share some."""

    begin: int
    end: int
    keys: list[str]


def read_whole(
    file: TensorFile,
    each: Callable[[str, Tensor], None],
    *,
    keys: Container[str],
    at_once: Container[str] = (),
    seen: Checksum,
    progress: Callable[[int], None] = lambda read: None,
) -> str:
    """Read the file, count the bytes of the stretches whose sums it states into ``seen``, and return its
    SHA-256 (hex).

    ``each`` is given the numbers of the tensors ``keys``, as they come: pieces of one dim, which it must not
    keep, or of a tensor in ``at_once`` all of it. Memory is bounded, but for these and for tensors that lie
    in the file otherwise than row by row. Raises ``BadCheckpoint`` if the file changes meanwhile.
    """
    digest, regions = hashlib.sha256(), _regions(file, keys)
    with file.opened() as fd:

        def read(begin: int, into: memoryview) -> None:
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done:]], begin + done)
                if count == 0:
                    expected, actual = f"{begin + len(into):,} bytes in the file", f"only {begin + done:,}"
                    todo = "The file shrank while it was read"
                    raise BadCheckpoint(file.path, expected=expected, found=actual, todo=todo)
                progress(count)
                done += count
            digest.update(into)
            for first, last, _ in file.sums:
                if first < begin + len(into) and begin < last:
                    part = into[max(first - begin, 0) : last - begin]
                    seen.add(max(first, begin), part)

        window, at, size = np.empty(_WINDOW, np.uint8), 0, os.fstat(fd).st_size
        for region in [*regions, _Region(size, size, [])]:
            for here, length in _windows(at, region.begin):
                read(here, window[:length].data)
            alone = region.keys[0] if len(region.keys) == 1 else None
            if alone is not None and alone not in at_once and _row_major(file, alone):
                for here, length in _windows(region.begin, region.end):
                    read(here, window[:length].data)
                    each(alone, torch.from_numpy(window[:length]).view(TORCH[file.tensors[alone].dtype]))
            elif region.keys:
                whole = np.empty(region.end - region.begin, np.uint8)
                for here, length in _windows(region.begin, region.end):
                    read(here, whole[here - region.begin :][:length].data)
                for key in region.keys:
                    each(key, _tensor(file, key, whole, region.begin))
            at = region.end
    return digest.hexdigest()


def _windows(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, end, _WINDOW):
        yield at, min(_WINDOW, end - at)


def _regions(file: TensorFile, keys: Container[str]) -> list[_Region]:
    extents = sorted((*file.extent(key), key) for key in file.tensors if key in keys)
    regions: list[_Region] = []
    for begin, end, key in extents:
        if begin == end:
            continue
        if regions and begin < regions[-1].end:
            regions[-1].end = max(regions[-1].end, end)
            regions[-1].keys.append(key)
        else:
            regions.append(_Region(begin, end, [key]))
    return regions


def _row_major(file: TensorFile, key: str) -> bool:
    begin, end = file.extent(key)
    entry = file.tensors[key]
    return end - begin == entry.nbytes and file.strides(key) == contiguous(entry.shape)


def _tensor(file: TensorFile, key: str, region: np.ndarray, begin: int) -> Tensor:
    """Return a tensor of the bytes of its region, which begins at byte ``begin`` of the file."""
    entry, (first, last) = file.tensors[key], file.extent(key)
    data = region[first - begin : last - begin]
    if (first - begin) % (BITS[entry.dtype] // 8):  # of another dtype than what lies before it
        data = data.copy()
    numbers = torch.from_numpy(data).view(TORCH[entry.dtype])
    return numbers.as_strided(entry.shape, file.strides(key))


class _HeldTensor(TensorFile):
    """Give a tensor that is in memory as if a file held it."""

    def __init__(self, file: TensorFile, name: str, tensor: Tensor) -> None:
        super().__init__(file.path, {name: file.tensors[name]}, {}, 0, None)
        self._tensor = tensor

    def read(self, name: str, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        numbers = self._tensor if box is None else self._tensor[box.slices]
        return numbers if out is None else out.copy_(numbers)


def held_tensors(places: Sequence[tuple[TensorFile, str]], tensors: Sequence[Tensor]) -> list[TensorFile]:
    """Return a file for each of these tensors, which were read from these places, that reads it no more."""
    return [_HeldTensor(file, name, tensor) for (file, name), tensor in zip(places, tensors, strict=True)]
