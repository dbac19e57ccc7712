"""Read every byte of a file of tensors once, in order: its SHA-256, its own sums, and the numbers in it."""

import hashlib
import os
from collections.abc import Callable, Container
from itertools import chain, pairwise

import torch
from torch import Tensor

from ..parallel_state import BadCheckpoint
from .crc import Checksum
from .dtypes import BITS, TORCH
from .safetensors_reader import TensorFile
from .strides import contiguous


def read_whole(
    file: TensorFile,
    each: Callable[[str, Tensor], None],
    *,
    keys: Container[str],
    at_once: Container[str] = (),
    progress: Callable[[int], None] = lambda read: None,
) -> tuple[str, Checksum]:
    """Read the file; return its SHA-256 (hex) and the sums of the stretches whose sums it states.

    ``each`` is given the numbers of the tensors ``keys``, as they come: pieces of one dim, which it must not
    keep, or of a tensor in ``at_once`` all of it. Memory is bounded, but for these and for tensors that lie
    in the file otherwise than row by row. Raises ``BadCheckpoint`` if the file changes meanwhile.
    """
    regions, digest, held, done = _regions(file, keys), hashlib.sha256(), bytearray(), 0
    end, tensors = 0, list[str]()
    with file.opened() as fd:
        size = os.fstat(fd).st_size
        bounds = chain(
            ((begin, end) for begin, (end, _) in regions.items()), (sums[:2] for sums in file.sums)
        )
        seen = Checksum({0, size}.union(*bounds))
        for at, data in seen.read_gaps(fd, *pairwise(sorted(seen.apart))):
            progress(len(data))
            digest.update(data)
            done += len(data)
            end, tensors = regions.get(at, (end, tensors))
            if at >= end:
                continue
            if len(tensors) == 1 and tensors[0] not in at_once and _row_major(file, tensors[0]):
                each(tensors[0], torch.frombuffer(data, dtype=TORCH[file.tensors[tensors[0]].dtype]))
                continue
            held += data
            if done == end:
                for key in tensors:
                    each(key, _tensor(file, key, held, end - len(held)))
                held = bytearray()
    if done < size:
        expected, todo = f"{size:,} bytes in the file", "The file shrank while it was read"
        raise BadCheckpoint(file.path, expected=expected, found=f"only {done:,}", todo=todo)
    return digest.hexdigest(), seen


def _regions(file: TensorFile, keys: Container[str]) -> dict[int, tuple[int, list[str]]]:
    """Return, by the first byte of a region, its end and the tensors in it: several if they share bytes."""
    regions: dict[int, tuple[int, list[str]]] = {}
    begin, end = 0, 0
    for first, last, key in sorted((*file.extent(key), key) for key in file.tensors if key in keys):
        if first < last:
            begin, end = (first, last) if first >= end else (begin, max(end, last))
            regions[begin] = end, [*regions.get(begin, (0, []))[1], key]
    return regions


def _row_major(file: TensorFile, key: str) -> bool:
    (begin, end), entry = file.extent(key), file.tensors[key]
    return end - begin == entry.nbytes and file.strides(key) == contiguous(entry.shape)


def _tensor(file: TensorFile, key: str, region: bytearray, begin: int) -> Tensor:
    """Return a tensor of the bytes of its region, which begins at byte ``begin`` of the file."""
    entry, (first, last) = file.tensors[key], file.extent(key)
    data = memoryview(region)[first - begin : last - begin]
    if (first - begin) % (BITS[entry.dtype] // 8):  # of another dtype than what lies before it
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=TORCH[entry.dtype]).as_strided(entry.shape, file.strides(key))
