"""Read boxes of tensors from a safetensors file: by ``pread``, checked, with constant extra memory.

The file is never mapped: a mapped file that shrinks kills the process with SIGBUS, and mapped pages count as
memory of ours in every tool that a user looks at.
"""

import hashlib
import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from ..parallel_state import BadCheckpoint, Box, require
from .crc import Checksum
from .dtypes import BITS, TORCH
from .safe_open import open_regular, read_full
from .safetensors_header import header_length, parse_header
from .strides import Runs, View, blocks, runs_of

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

#: A run shorter than this costs more as a system call of its own than the bytes between it and the next.
_RUN_WORTH_A_CALL = 4096
_SCRATCH = 1 << 20
#: Elements that are read at once where the order of dims changes, few beside a block of a conversion.
_AT_ONCE = 1 << 18
#: The number of pieces of a file that ``state`` reads, besides the last one, and their bytes.
_SAMPLES, _SAMPLE = 64, 4096


class TensorFile:
    """Read a safetensors file whose header was checked. It holds no file descriptor between calls.

    ``tensors``: for each name its ``View``. ``size``: the bytes of the whole file. ``identity`` changes when
    the file changes, even if its time stamp was put back. Safe to use from several threads at once.
    """

    def __init__(
        self, path: Path, tensors: dict[str, View], data_begin: int, size: int, identity: object
    ) -> None:
        self.path, self.tensors, self.data_begin = path, tensors, data_begin
        self.size, self.identity = size, identity

    def __repr__(self) -> str:
        """Return a text that is the same in the next process, for the identity of a plan."""
        return f"{type(self).__name__}({str(self.path)!r})"

    @classmethod
    def open(cls, path: Path | str, *, expected: Container[str] = ()) -> Self:
        """Read and check the header of ``path``.

        Every flaw of the file is a ``BadInput`` of one line naming the file and the tensor. ``expected`` are
        names that are known to be wanted; any other name that looks like a path is refused.
        """
        path = Path(path)
        with open_regular(path) as (fd, status):
            first = os.pread(fd, 256, 0)
            length = header_length(first, status.st_size, path)
            raw = os.pread(fd, length, 8)
            require(len(raw) >= length, path, None, f"{length:,} bytes of header", f"{len(raw):,}")
            header, size = parse_header(raw, status.st_size, path, expected=expected), status.st_size
            return cls(path, *header, size, identity_of(status))

    @property
    def stored_in(self) -> Sequence["TensorFile"]:
        """Return the files on the disk that the tensors are read from: this one, unless they are unpacked."""
        return (self,)

    @property
    def sums(self) -> Sequence[tuple[int, int, int]]:
        """Return begin, end and CRC-32 of stretches whose sums the file states itself: safetensors none."""
        return ()

    def read(self, name: str, box: Box | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the elements of tensor ``name`` in ``box`` (default: all), of the box's shape.

        ``out``, if given, is filled and returned: a contiguous CPU tensor of that shape and of the stored
        dtype. Raises ``BadInput`` for a type that torch has not, ``BadCheckpoint`` for a file that changed.
        """
        entry = self.tensors[name]
        box = Box.whole(entry.shape) if box is None else box
        todo = "Quantised checkpoints are not supported"
        require(entry.dtype in TORCH, self.path, name, "a dtype that torch holds", entry.dtype, todo)
        out = torch.empty(box.shape, dtype=TORCH[entry.dtype]) if out is None else out
        fits = out.dtype == TORCH[entry.dtype] and out.shape == box.shape and out.is_contiguous()
        assert fits, (name, out.dtype, out.shape)
        if not box.size:
            return out
        strides = entry.strides
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        with self.opened() as fd:
            if all(a < b for a, b in pairwise(dim for dim in order if box.shape[dim] > 1)):
                self._fill(fd, name, self._runs(name, box), out)
                return out
            # The dims lie in another order: a block at a time is read as it lies, and turned.
            shape, start, stop, steps = (
                tuple(sizes[dim] for dim in order) for sizes in (entry.shape, box.start, box.stop, strides)
            )
            turned, target = Box(start, stop), out.permute(order)
            for part in blocks(turned, _AT_ONCE):
                piece = torch.empty(part.shape, dtype=out.dtype)
                self._fill(fd, name, runs_of(shape, part, out.element_size(), steps), piece)
                target[part.within(turned).slices] = piece
        return out

    def read_ahead(self, name: str, box: Box) -> None:
        """Ask the system to fetch ``box`` of tensor ``name`` from the disk, without waiting for it.

        Each read opens the file, so that the system never sees reads that follow each other.
        """
        if self.stored_in[0] is not self or not hasattr(os, "posix_fadvise"):
            return
        runs = [*self._runs(name, box)]
        first = min(run.offset for run in runs)
        last = max(run.offset + (run.rows - 1) * run.stride + run.length for run in runs)
        begin = self.tensors[name].begin
        with self.opened() as fd:
            os.posix_fadvise(fd, begin + first, last - first, os.POSIX_FADV_WILLNEED)

    def _fill(self, fd: int, name: str, all_runs: Iterable[Runs], out: torch.Tensor) -> None:
        """Fill a tensor with the runs of ``name``, one after another."""
        into, begin, at = out.reshape(-1).view(torch.uint8).numpy(), self.tensors[name].begin, 0

        def read(part: Bytes, offset: int) -> None:
            if (count := read_full(fd, part.data, begin + offset)) < part.size:
                first, todo = begin + offset, "The file shrank while it was read"
                expected, actual = f"{first + part.size:,} bytes in the file", f"only {first + count:,}"
                raise BadCheckpoint(self.path, name, expected=expected, found=actual, todo=todo)

        for runs in all_runs:
            _read_runs(read, runs, into[at : at + runs.rows * runs.length])
            at += runs.rows * runs.length
        assert at == into.size, (at, into.size)

    def count_in(self, name: str, box: Box, numbers: torch.Tensor, seen: Checksum) -> int | None:
        """Count what ``read`` gave for ``box`` into the file's checksum, if it is one run of bytes there, and
        return their CRC-32; other runs are left to whoever reads what the checksum lacks.
        """
        ranges = [*islice(self.byte_ranges(name, box), 2)]
        if len(ranges) != 1:
            return None
        return seen.add(ranges[0][0], numbers.reshape(-1).view(torch.uint8).numpy().data)

    def state(self) -> tuple[str, object, str]:
        """Return what identifies this very content: the path, the identity, and a hash of the header, of
        samples and of the sums in the file itself.

        The samples are for file systems whose change times say nothing. There, a change of a few bytes
        between two samples is not noticed.
        """
        with self.opened() as fd:
            digest = hashlib.sha256(os.pread(fd, self.data_begin, 0))
            for sample in range(_SAMPLES):
                begin = self.data_begin + (self.size - self.data_begin) * sample // _SAMPLES
                digest.update(os.pread(fd, _SAMPLE, begin))
            digest.update(os.pread(fd, _SAMPLE, max(self.data_begin, self.size - _SAMPLE)))
        digest.update(repr(self.sums).encode())
        return str(self.path), self.identity, digest.hexdigest()

    def byte_ranges(self, name: str, box: Box | None = None) -> Iterator[tuple[int, int]]:
        """Yield the ``(offset, length)`` in the file of each contiguous run of ``box``, in element order."""
        begin = self.tensors[name].begin
        for runs in self._runs(name, box or Box.whole(self.tensors[name].shape)):
            for row in range(runs.rows):
                yield begin + runs.offset + row * runs.stride, runs.length

    def _runs(self, name: str, box: Box) -> Iterator[Runs]:
        """Yield the runs of ``box``, in element order, counted from where the tensor begins."""
        entry = self.tensors[name]
        assert BITS[entry.dtype] % 8 == 0, entry.dtype
        return runs_of(entry.shape, box, entry.itemsize, entry.strides)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor of the file; refuse a file that changed since its header was read."""
        with open_regular(self.path, kind=BadCheckpoint) as (fd, status):
            if identity_of(status) != self.identity:
                actual = "a file changed since"
                raise BadCheckpoint(self.path, expected="the file as it was opened", found=actual)
            yield fd


def _read_runs(read: Callable[[Bytes, int], None], runs: Runs, into: Bytes) -> None:
    rows, length, stride = runs.rows, runs.length, runs.stride
    at_once = _SCRATCH // stride
    if rows == 1 or length >= _RUN_WORTH_A_CALL or at_once < 2:
        for row in range(rows):
            read(into[row * length : (row + 1) * length], runs.offset + row * stride)
        return
    scratch = np.empty(min(at_once, rows) * stride, np.uint8)
    for row in range(0, rows, at_once):
        count = min(at_once, rows - row)
        span = scratch[: (count - 1) * stride + length]
        read(span, runs.offset + row * stride)
        into.reshape(rows, length)[row : row + count] = as_strided(span, (count, length), (stride, 1))


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    """Return values that change with a file's content; no program can set the last one, the change time."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
