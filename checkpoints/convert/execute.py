"""Carry out a plan of copies: in blocks, by several threads, in memory that does not grow with the model.

A block of rows is read once for all tensors that are made from it. So a matrix that is cut by columns for
eight ranks is read once, not eight times, and each write to a file is nearly always one run of bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock, local

import torch
from torch import Tensor

from ...parallel_state import BadInput, Box
from ...storage.catalog import Key, join
from ...storage.crc import Checksum
from ...storage.dtypes import BITS, TORCH, look_at, smallest
from ...storage.safetensors_reader import TensorFile
from ...storage.safetensors_writer import TensorWriter
from ...storage.small_files import FinishedWork
from ..lora import Change
from .groups import Group, cut_into_blocks, dtype_of, shared, spread
from .plan import Transfer

#: Bytes of a block: still in the processor's cache when it is written, and large beside the bookkeeping. A
#: worker holds at most four at once: the numbers read, the part made of them, its cast, and the file range
#: that a read spans.
BLOCK = 4 << 20


@dataclass
class Report:
    """Count the bytes that were moved, and name the tensors whose numbers need a warning.

    By tensor, ``overflows`` counts the numbers that a cast made infinite, and ``underflows`` the numbers that
    a cast made zero. ``vanished`` names the tensors that a cast turned into zeros only; ``zeros`` names the
    tensors that hold only zeros.
    """

    bytes_read: int = 0
    bytes_made: int = 0
    overflows: Counter[str] = field(default_factory=Counter)
    underflows: Counter[str] = field(default_factory=Counter)
    vanished: set[str] = field(default_factory=set)
    zeros: set[str] = field(default_factory=set)


def execute(
    transfers: Iterable[tuple[Transfer, TensorWriter]],
    *,
    change: Callable[[str], Change | None] = lambda name: None,
    threads: int = 2,
    block: int | None = None,
    allow_nonfinite: bool = False,
    seen: Mapping[TensorFile, Checksum] | None = None,
    finished: FinishedWork | None = None,
    progress: Callable[[int], None] = lambda made: None,
) -> Report:
    """Make the tensor of every transfer in its file.

    ``change`` returns, for the name of a tensor, a function that changes its numbers block by block.
    ``block``: bytes of a block; the default is ``BLOCK``. ``seen``: a checksum of each file, which
    collects the sums of the bytes that are read. Work that ``finished`` notes as done is not done again, if
    its bytes in the files have the noted sums. ``progress`` is called with the bytes made since the last
    call, from any of ``threads``. Raises ``BadInput`` for the first number that is not finite, unless
    ``allow_nonfinite``, and ``BadCheckpoint`` for a plan that does not set every element exactly once. The
    first error ends the work; the files must then not be used.
    """
    groups: dict[object, Group] = defaultdict(list)
    for transfer, writer in transfers:
        transfer.check()
        if transfer.box.size:
            groups[shared(transfer)].append((transfer, writer))
    work = _Work(change, block or BLOCK, allow_nonfinite, seen or {}, finished, progress)
    pool = ThreadPoolExecutor(max(1, threads))
    try:
        for done in [pool.submit(work.make, *numbered) for numbered in spread([*groups.values()], threads)]:
            done.result()
        if finished is not None:
            finished.wait()
    finally:
        pool.shutdown(cancel_futures=True)
        if finished is not None:
            finished.close()
    work.report.zeros = {group[0][0].name for group in groups.values()} - work.not_zero
    work.report.vanished = set(work.report.underflows) - work.left
    return work.report


@dataclass(frozen=True, slots=True)
class _Read:
    """Box ``box`` of a stored tensor, in memory; its CRC-32 if it was taken; whether all of it is zero."""

    numbers: Tensor
    box: Box
    crc: int | None
    zero: bool


@dataclass
class _Work:
    """Hold the data that all threads of one conversion share."""

    change: Callable[[str], Change | None]
    block: int
    allow_nonfinite: bool
    seen: Mapping[TensorFile, Checksum]
    finished: FinishedWork | None
    progress: Callable[[int], None]
    report: Report = field(default_factory=Report)
    #: Tensors with a number other than zero: as it was read, and after a cast.
    not_zero: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)
    _scratch: local = field(default_factory=local)

    def make(self, number: int, group: Group) -> None:
        """Make all blocks of the transfers that share their sources, which are of one tensor."""
        name = group[0][0].name
        if self._was_made(number, group):
            self.not_zero.add(name)  # groups with zeros are made again, so this one had other numbers
            self.left.add(name)
            return
        remarkable, made = False, 0
        coming = cut_into_blocks(group, self.block)
        following = next(coming, None)
        while (block := following) is not None:
            if (following := next(coming, None)) is not None:
                for place, box in following.needed.items():
                    place.file.read_ahead(place.key, box)
            read = self._read_block(block.needed)
            zero = all(piece.zero for piece in read.values())
            lost = [self._make_part(*part, read) for part in block.parts]
            remarkable |= zero or any(lost)
            made += sum(part.size * BITS[transfer.dtype] // 8 for transfer, _, part in block.parts)
            if not zero:
                self.not_zero.add(name)
            with self._lock:
                self.report.bytes_read += sum(piece.numbers.nbytes for piece in read.values())
        with self._lock:
            self.report.bytes_made += made
        # A group with a warning is not noted: a resumed conversion makes it again and warns again.
        if self.finished is not None and not remarkable:
            self.finished.note(number, made, lambda: _sums(group))

    def _was_made(self, number: int, group: Group) -> bool:
        """Return whether the output files already hold the tensors of this group, as the journal says.

        If so, each file counts these tensors as written.
        """
        noted = None if self.finished is None else self.finished.done.get(number)
        if noted is None or noted != _sums(group):
            return False
        for (transfer, writer), crc in zip(group, noted, strict=True):
            writer.take(transfer.name, crc)
            self.progress(transfer.nbytes)
        return True

    def _read_block(self, needed: Mapping[Key, Box]) -> dict[Key, _Read]:
        """Read the stored numbers that the parts of a block need."""
        read = {}
        for number, (place, box) in enumerate(needed.items()):
            out = self._buffer(f"read {number}", box.shape, dtype_of(place))
            place.file.read(place.key, box, out=out)
            zero = self._look(place, box, out)
            read[place] = _Read(out, box, self._sum(place, box, out), zero)
        return read

    def _sum(self, place: Key, box: Box, numbers: Tensor) -> int | None:
        """Return the CRC-32 of these numbers, if it is wanted and they are one run of bytes in the file."""
        ranges = [*islice(place.file.byte_ranges(place.key, box), 2)] if self.seen and box.size else []
        if len(ranges) != 1:
            return None
        return self.seen[place.file].add(ranges[0][0], numbers.reshape(-1).view(torch.uint8).numpy().data)

    def _look(self, place: Key, box: Box, numbers: Tensor) -> bool:
        """Refuse numbers that are not finite; return whether all are zero."""
        seen = look_at(numbers)
        if not seen.finite and not self.allow_nonfinite:
            index = (~torch.isfinite(numbers)).nonzero()[0].tolist()
            at = [a + i for a, i in zip(box.start, index, strict=True)]
            actual, todo = (
                f"{numbers[tuple(index)].item()} at {at}",
                "Pass --allow-nonfinite to take it as it is",
            )
            raise BadInput(place.file.path, place.key, expected="finite numbers", found=actual, todo=todo)
        return seen.zero

    def _make_part(self, transfer: Transfer, writer: TensorWriter, part: Box, read: dict[Key, _Read]) -> int:
        """Write one part; return how many of its numbers a cast made infinite or zero."""
        pieces, crc, lost = [], None, 0
        for whole in transfer.pieces:
            if (piece := whole.narrow(part)) is not None:
                source = read[piece.stored]
                pieces.append((piece.box, piece.of(source.numbers, source.box.start)))
                if piece.ordered and piece.hull == source.box:
                    crc = source.crc
        made, as_read = join(part, pieces, lambda dtype: self._buffer("made", part.shape, dtype))
        if (change := self.change(transfer.name)) is not None:
            made, as_read = change(made, part), False
        if made.dtype != TORCH[transfer.dtype]:
            made, lost = self._cast(transfer, made)
            as_read = False
        writer.write(transfer.name, part.within(transfer.box), made, crc if as_read else None)
        self.progress(made.nbytes)
        return lost

    def _cast(self, transfer: Transfer, numbers: Tensor) -> tuple[Tensor, int]:
        """Return the numbers in the transfer's dtype; and how many of them that made infinite or zero."""
        cast = self._buffer("cast", tuple(numbers.shape), TORCH[transfer.dtype])
        cast.copy_(numbers)
        look, lost = look_at(cast), 0
        if not look.zero:
            self.left.add(transfer.name)
        if not look.finite:
            overflows = int((~torch.isfinite(cast) & torch.isfinite(numbers)).sum())
            lost += self._count(self.report.overflows, transfer.name, overflows)
        if smallest(cast.dtype) > smallest(numbers.dtype):
            underflows = int(torch.count_nonzero(numbers)) - int(torch.count_nonzero(cast))
            lost += self._count(self.report.underflows, transfer.name, underflows)
        return cast, lost

    def _count(self, counts: Counter[str], name: str, number: int) -> int:
        if number:
            with self._lock:
                counts[name] += number
        return number

    def _buffer(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of this thread, the same at each call: fresh pages cost as much as the copy itself."""
        known: dict[str, Tensor] = self._scratch.__dict__
        size = torch.Size(shape).numel() * dtype.itemsize
        if use not in known or known[use].numel() < size:
            known.pop(use, None)  # before, so that the two are never there together
            known[use] = torch.empty(size, dtype=torch.uint8)
        return known[use][:size].view(dtype).view(shape)


def _sums(group: Group) -> list[int]:
    """Return, for each transfer, the CRC-32 of the bytes that its file now holds for its whole tensor."""
    return [writer.sum_of(transfer.name) for transfer, writer in group]
