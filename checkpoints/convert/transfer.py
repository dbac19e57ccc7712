"""Define one step of a conversion, and how such steps are grouped, ordered and cut into blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, zip_longest
from math import prod

from torch import Tensor

from ...parallel_state import BadCheckpoint, Box
from ...storage.coverage import first_flaw
from ...storage.dtypes import BITS
from ...storage.safetensors_writer import TensorWriter
from ..copies import Copy

#: Takes numbers as they are stored, and their box of the whole tensor; returns the numbers to write instead.
Change = Callable[[Tensor, Box], Tensor]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Hold all copies into one output tensor.

    They fill ``box`` of the whole tensor ``name``; the copies' targets are positions in the whole. The tensor
    is written as ``dtype``, the format's name. ``fixed``: a cast leaves it as it is.
    """

    name: str
    box: Box
    copies: tuple[Copy, ...]
    dtype: str
    fixed: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.box.shape) * BITS[self.dtype] // 8


#: The target of a transfer: a file whose tensor of that name has the box's shape, or such a CPU tensor.
Target = TensorWriter | Tensor
#: Transfers that share their sources, each with its target.
Group = list[tuple[Transfer, Target]]


def check(transfer: Transfer) -> None:
    """Refuse a plan that does not set every element of the box exactly once."""
    targets = [copy.target for copy in transfer.copies]
    if flaw := first_flaw(transfer.box, targets):
        raise BadCheckpoint("plan", transfer.name, expected="each element set once", found=str(flaw))
    assert all(target.intersect(transfer.box) == target for target in targets if target.size), transfer


def shared(transfer: Transfer) -> object:
    """Return a key; transfers with equal keys read the same rows of the same stored tensors, in one go."""
    rows = (transfer.box.start[:1], transfer.box.stop[:1])
    return transfer.name, rows, frozenset((copy.file, copy.key, copy.transpose) for copy in transfer.copies)


def hull(a: Box, b: Box) -> Box:
    """Return the smallest box that contains both."""
    return Box(tuple(map(min, a.start, b.start)), tuple(map(max, a.stop, b.stop)))


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
    whole = reduce(hull, (transfer.box for transfer in group))
    if not whole.start:
        yield whole
        return
    ends = {
        end
        for transfer in group
        for copy in transfer.copies
        for end in (copy.target.start[0], copy.target.stop[0])
    }
    first, last = whole.start[0], whole.stop[0]
    for start, stop in pairwise(sorted({first, last} | {end for end in ends if first < end < last})):
        yield whole.narrow(0, start - first, stop - first)


def source_of(copy: Copy, part: Box) -> Box:
    """Return the box of the stored tensor from which ``part`` of the copy's target is copied."""
    return part.within(copy.target).turned(len(copy.source.start), copy.transpose).shift(copy.source.start)
