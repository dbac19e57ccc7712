"""Define one step of a conversion, and how such steps are grouped, ordered and cut into blocks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, zip_longest
from math import prod

from torch import Tensor

from ...parallel_state import BadCheckpoint, Box, Piece
from ...storage.catalog import Key
from ...storage.coverage import first_flaw
from ...storage.dtypes import BITS
from ...storage.safetensors_writer import TensorWriter

#: Takes numbers as they are stored, and their box of the whole tensor; returns the numbers to write instead.
Change = Callable[[Tensor, Box], Tensor]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Say what one output tensor is made of: the pieces of ``box`` of the whole tensor ``name``.

    It is written as ``dtype``, the format's name. ``fixed``: a cast leaves it as it is.
    """

    name: str
    box: Box
    pieces: tuple[Piece[Key], ...]
    dtype: str
    fixed: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.box.shape) * BITS[self.dtype] // 8


#: Transfers that share their sources, each with the file whose tensor of that name has the box's shape.
Group = list[tuple[Transfer, TensorWriter]]


def check(transfer: Transfer) -> None:
    """Refuse a plan that does not set every element of the box exactly once."""
    boxes = [piece.box for piece in transfer.pieces]
    if flaw := first_flaw(transfer.box, boxes):
        raise BadCheckpoint("plan", transfer.name, expected="each element set once", found=str(flaw))
    assert all(box.intersect(transfer.box) == box for box in boxes if box.size), transfer


def shared(transfer: Transfer) -> object:
    """Return a key; transfers with equal keys read the same rows of the same stored tensors, in one go."""
    rows = (transfer.box.start[:1], transfer.box.stop[:1])
    return transfer.name, rows, frozenset((piece.stored, piece.dims) for piece in transfer.pieces)


def spread(groups: Sequence[Group], threads: int) -> list[tuple[int, Group]]:
    """Return the numbered groups in an order in which each thread works in another stretch of the plan.

    Threads that write to the same file wait for each other in the operating system.
    """
    numbered = [*enumerate(groups)]
    each = -(-len(numbered) // max(1, threads))
    stretches = [numbered[start : start + each] for start in range(0, len(numbered), max(1, each))]
    return [numbered for together in zip_longest(*stretches) for numbered in together if numbered is not None]


def slabs(group: Sequence[Transfer]) -> Iterator[Box]:
    """Cut the box that a group makes where its sources end; a block then mostly lies in one run of a file."""
    whole = reduce(Box.around, (transfer.box for transfer in group))
    if not whole.start:
        yield whole
        return
    ends = {
        end
        for transfer in group
        for piece in transfer.pieces
        if piece.dense  # pieces with steps lie between each other, and are read together
        for end in (piece.box.start[0], piece.box.stop[0])
    }
    first, last = whole.start[0], whole.stop[0]
    for start, stop in pairwise(sorted({first, last} | {end for end in ends if first < end < last})):
        yield whole.narrow(0, start - first, stop - first)
