"""Carry out a plan of copies: in blocks, by several threads, in memory that does not grow with the model.

A block of rows is read once for all tensors that are made from it. So a matrix that is cut by columns for
eight ranks is read once, not eight times, and each write to a file is nearly always one run of bytes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise, zip_longest
from threading import local

import torch
from torch import Tensor

from ...parallel_state import BadInput, Box
from ...storage.catalog import Key, Seen, join
from ...storage.dtypes import BITS, TORCH, look_at, smallest
from ...storage.safetensors_writer import TensorWriter
from ...storage.small_files import FinishedWork
from ...storage.strides import blocks
from ..lora import Change
from .plan import Transfer

#: Bytes of a block: still in the processor's cache when it is written, and large beside the bookkeeping. A
#: worker holds at most four at once: the numbers read, the part made of them, its cast, and the file range
#: that a read spans.
BLOCK = 4 << 20

#: Transfers that share their sources, each with the file whose tensor of that name has the box's shape.
Group = list[tuple[Transfer, TensorWriter]]


#: What became of a tensor's numbers: how many ``overflows`` and ``underflows``, which a cast made infinite or
#: zero; how many blocks of ``zeros`` and of ``others`` were read; those with others ``left`` after a cast.
Tally = Counter[str]


@dataclass(frozen=True, slots=True)
class _Read:
    """Box ``box`` of a stored tensor, in memory; its CRC-32 if it was taken; whether all of it is zero."""

    numbers: Tensor
    box: Box
    crc: int | None
    zero: bool


@dataclass
class Work:
    """Make the tensors of transfers in their files, by several threads.

    ``change`` returns, for the name of a tensor, a function that changes its numbers block by block.
    ``block``: bytes of a block. ``seen``: a checksum of each file, which collects the sums of the bytes that
    are read. Work that ``finished`` notes as done is not done again, if its bytes in the files have the noted
    sums. ``progress`` is called with the bytes made since the last call, from any of the threads.
    """

    change: Callable[[str], Change | None] = lambda name: None
    block: int = BLOCK
    allow_nonfinite: bool = False
    seen: Seen = field(default_factory=dict)
    finished: FinishedWork | None = None
    progress: Callable[[int], None] = lambda made: None
    _scratch: local = field(default_factory=local)

    def execute(
        self, transfers: Iterable[tuple[Transfer, TensorWriter]], threads: int = 2
    ) -> dict[str, Tally]:
        """Make the tensor of every transfer in its file; return the tally of each name.

        Raises ``BadInput`` for the first number that is not finite, unless ``allow_nonfinite``. The first
        error ends the work; the files must then not be used.
        """
        groups: dict[object, Group] = defaultdict(list)
        for transfer, writer in transfers:
            if transfer.box.size:
                groups[_shared(transfer)].append((transfer, writer))
        pool, tallies = ThreadPoolExecutor(max(1, threads)), defaultdict[str, Tally](Tally)
        try:
            for future in [pool.submit(self.make, *group) for group in _spread([*groups.values()], threads)]:
                name, tally = future.result()
                tallies[name].update(tally)
            if self.finished is not None:
                self.finished.wait()
        finally:
            pool.shutdown(cancel_futures=True)
            if self.finished is not None:
                self.finished.close()
        return dict(tallies)

    def make(self, number: int, group: Group) -> tuple[str, Tally]:
        """Make all blocks of the transfers that share their sources, which are of one tensor: its name."""
        name, tally, nbytes = group[0][0].name, Tally(), 0
        if self._was_made(number, group):  # groups with zeros are made again, so this one had other numbers
            return name, Tally(others=1, left=1)
        coming = _cut_into_blocks(group, self.block)
        following = next(coming, None)
        while (block := following) is not None:
            if (following := next(coming, None)) is not None:
                for place, box in following.needed.items():
                    place.file.read_ahead(place.key, box)
            read = self._read_block(block.needed)
            tally["zeros" if all(piece.zero for piece in read.values()) else "others"] += 1
            for part in block.parts:
                self._make_part(*part, read, tally)
            nbytes += sum(part.size * BITS[transfer.dtype] // 8 for transfer, _, part in block.parts)
        # A group with a warning is not noted: a resumed conversion makes it again and warns again.
        if self.finished is not None and not tally.keys() & {"zeros", "overflows", "underflows"}:
            self.finished.note(number, nbytes, lambda: _sums(group))
        return name, tally

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
        read = {}
        for number, (place, box) in enumerate(needed.items()):
            out = self._buffer(f"read {number}", box.shape, _dtype_of(place))
            place.file.read(place.key, box, out=out)
            zero, checksum = self._look(place, box, out), self.seen.get(place.file)
            crc = None if checksum is None else place.file.count_in(place.key, box, out, checksum)
            read[place] = _Read(out, box, crc, zero)
        return read

    def _look(self, place: Key, box: Box, numbers: Tensor) -> bool:
        """Refuse numbers that are not finite; return whether all are zero."""
        facts = look_at(numbers)
        if not facts.finite and not self.allow_nonfinite:
            index = (~torch.isfinite(numbers)).nonzero()[0].tolist()
            at = [a + i for a, i in zip(box.start, index, strict=True)]
            todo = "Pass --allow-nonfinite to take it as it is"
            actual = f"{numbers[tuple(index)].item()} at {at}"
            raise BadInput(place.file.path, place.key, expected="finite numbers", found=actual, todo=todo)
        return facts.zero

    def _make_part(
        self, transfer: Transfer, writer: TensorWriter, part: Box, read: dict[Key, _Read], tally: Tally
    ) -> None:
        pieces, crc = [], None
        for whole in transfer.pieces:
            if (piece := whole.narrow(part)) is not None:
                source = read[piece.stored]
                pieces.append((piece.box, piece.of(source.numbers, source.box.start)))
                if piece.ordered and piece.hull == source.box:
                    crc = source.crc
        numbers, as_read = join(part, pieces, lambda dtype: self._buffer("made", part.shape, dtype))
        if (change := self.change(transfer.name)) is not None:
            numbers, as_read = change(numbers, part), False
        if numbers.dtype != TORCH[transfer.dtype]:
            numbers, as_read = self._cast(numbers, TORCH[transfer.dtype], tally), False
        writer.write(transfer.name, part.within(transfer.box), numbers, crc if as_read else None)
        self.progress(numbers.nbytes)

    def _cast(self, numbers: Tensor, dtype: torch.dtype, tally: Tally) -> Tensor:
        cast = self._buffer("cast", tuple(numbers.shape), dtype)
        cast.copy_(numbers)
        look = look_at(cast)
        counts = Tally(left=not look.zero)
        if not look.finite:
            counts["overflows"] = int((~torch.isfinite(cast) & torch.isfinite(numbers)).sum())
        if smallest(cast.dtype) > smallest(numbers.dtype):
            counts["underflows"] = int(torch.count_nonzero(numbers)) - int(torch.count_nonzero(cast))
        tally += counts  # of what is none, no key is made
        return cast

    def _buffer(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of this thread, the same at each call: fresh pages cost as much as the copy itself."""
        buffers: dict[str, Tensor] = self._scratch.__dict__
        size = torch.Size(shape).numel() * dtype.itemsize
        if use not in buffers or buffers[use].numel() < size:
            buffers.pop(use, None)  # before, so that the two are never there together
            buffers[use] = torch.empty(size, dtype=torch.uint8)
        return buffers[use][:size].view(dtype).view(shape)


def _sums(group: Group) -> list[int]:
    """Return, for each transfer, the CRC-32 of the bytes that its file now holds for its whole tensor."""
    return [writer.sum_of(transfer.name) for transfer, writer in group]


@dataclass(frozen=True, slots=True)
class _Block:
    """List the parts of a block, and what they need: one smallest box of each stored tensor."""

    parts: list[tuple[Transfer, TensorWriter, Box]]
    needed: dict[Key, Box]


def _shared(transfer: Transfer) -> object:
    """Return a key; transfers with equal keys read the same rows of the same stored tensors, in one go."""
    rows = (transfer.box.start[:1], transfer.box.stop[:1])
    return transfer.name, rows, frozenset((piece.stored, piece.dims) for piece in transfer.pieces)


def _spread(groups: Sequence[Group], threads: int) -> list[tuple[int, Group]]:
    """Return the numbered groups in an order in which each thread works in another stretch of the plan.

    Threads that write to the same file wait for each other in the operating system.
    """
    numbered = [*enumerate(groups)]
    length = -(-len(numbered) // max(1, threads))
    stretches = [numbered[start : start + length] for start in range(0, len(numbered), max(1, length))]
    return [numbered for together in zip_longest(*stretches) for numbered in together if numbered is not None]


def _cut_into_blocks(group: Group, nbytes: int) -> Iterator[_Block]:
    """Yield what a group makes in blocks of at most about ``nbytes``, and what each is made of."""
    transfers = [transfer for transfer, _ in group]
    pieces = (piece for transfer in transfers for piece in transfer.pieces)
    most = nbytes // max(_dtype_of(piece.stored).itemsize for piece in pieces)
    for box in (box for slab in _slabs(transfers) for box in blocks(slab, most)):
        parts = [(*pair, part) for pair in group if (part := pair[0].box.intersect(box))]
        needed: dict[Key, Box] = {}
        for transfer, _, part in parts:
            for whole in transfer.pieces:
                if (piece := whole.narrow(part)) is not None:
                    hull, place = piece.hull, piece.stored
                    needed[place] = needed[place].around(hull) if place in needed else hull
        yield _Block(parts, needed)


def _dtype_of(stored: Key) -> torch.dtype:
    return TORCH[stored.file.tensors[stored.key].dtype]


def _slabs(group: Sequence[Transfer]) -> Iterator[Box]:
    """Cut the box that a group makes where its sources end; a block then mostly lies in one run of a file."""
    whole = reduce(Box.around, (transfer.box for transfer in group))
    if not whole.start:
        yield whole
        return
    # Pieces with steps lie between each other, and are read together.
    dense = [piece.box for transfer in group for piece in transfer.pieces if piece.dense]
    ends = {end for box in dense for end in (box.start[0], box.stop[0])}
    first, last = whole.start[0], whole.stop[0]
    for start, stop in pairwise(sorted({first, last} | {end for end in ends if first < end < last})):
        yield whole.narrow(0, start - first, stop - first)
