"""Define a box, a rectangular part of a whole tensor, and a piece: where its elements lie in another tensor.

Tables of names, cuts into files and the plans of reads and conversions are all made of pieces. Positions are
counted in elements and never in bytes: packed tensors (FP8, MXFP4) have no strides. Plans make millions of
boxes: ``map`` over operators, rather than generators, keeps each at a microsecond or two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import add, le, lt, mul, neg, sub
from typing import Generic, TypeVar

from torch import Tensor


def shared_units(units: int, size: int, index: int) -> range:
    """Return the units, such as key/value heads, that rank ``index`` of ``size`` ranks needs if ``size`` does
    not divide them: all units that overlap the rank's equal share of the whole.

    >>> [shared_units(3, 2, rank) for rank in (0, 1)]
    [range(0, 2), range(1, 3)]
    """
    return range(units * index // size, -(-units * (index + 1) // size))


@dataclass(frozen=True, slots=True)
class Box:
    """Describe the elements ``start <= index < stop`` of a tensor, with one pair of bounds for each dim.

    A scalar's box has no bounds.

    >>> Box((0, 4), (2, 8)).shape
    (2, 4)
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.start) == len(self.stop), (self.start, self.stop)
        assert not self.start or min(self.start) >= 0, (self.start, self.stop)
        assert all(map(le, self.start, self.stop)), (self.start, self.stop)

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        """Return the box of all elements of a tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the size of the box in each dim."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Return the number of elements; 1 for a scalar, 0 for an empty box."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the slices that select the box from the whole tensor."""
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Box) -> Box | None:
        """Return the elements that both boxes hold, or ``None`` if there are none."""
        if self.start and (self.start[0] >= other.stop[0] or other.start[0] >= self.stop[0]):
            return None  # as most of a plan's boxes, such as those of other experts: said without a tuple
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(lt, start, stop)) else None

    def shift(self, by: tuple[int, ...]) -> Box:
        """Return the box moved by this many elements on each dim."""
        assert len(by) == len(self.start), (self, by)
        return Box(tuple(map(add, self.start, by)), tuple(map(add, self.stop, by)))

    def within(self, outer: Box) -> Box:
        """Return this box in the coordinates of ``outer``, which contains it."""
        return self.shift(tuple(map(neg, outer.start)))

    def around(self, other: Box) -> Box:
        """Return the smallest box that contains both."""
        return Box(tuple(map(min, self.start, other.start)), tuple(map(max, self.stop, other.stop)))

    def narrow(self, dim: int, start: int, stop: int) -> Box:
        """Return the part between ``start`` and ``stop`` of ``dim``, counted from the start of this box."""
        a, b = list(self.start), list(self.stop)
        a[dim], b[dim] = self.start[dim] + start, self.start[dim] + stop
        return Box(tuple(a), tuple(b))


Shape = tuple[int, ...]
#: What names the tensor that holds the elements: a name, or a file and a key in it.
Holder = TypeVar("Holder")
Other = TypeVar("Other")


@lru_cache(maxsize=64)
def _axes(dims: int) -> tuple[Shape, Shape, Shape]:
    """Return the start, dims and steps of a plain piece, shared by all: a checkpoint has a million."""
    return (0,) * dims, tuple(range(dims)), (1,) * dims


@dataclass(frozen=True, slots=True)
class Piece(Generic[Holder]):
    """Say that the elements of ``box`` are those of the tensor ``stored`` from ``start`` on.

    Element (i, j, ...) of the box is the stored element ``start + steps * (i, j, ...)``, with dim d of the
    box along dim ``dims[d]`` of the stored tensor. ``None`` is a dim of size 1 that the stored tensor does
    not have; a dim of the stored tensor that no dim runs along stays at ``start``.
    """

    box: Box
    stored: Holder
    start: Shape
    dims: tuple[int | None, ...]
    steps: Shape

    @staticmethod
    def plain(box: Box, stored: Other, start: Shape | None = None) -> Piece[Other]:
        """Return the piece that is one box of the stored tensor, from ``start`` on; by default all of it.

        >>> Piece.plain(Box((4, 0), (6, 3)), "w").narrow(Box((5, 1), (9, 9))).hull
        Box(start=(1, 1), stop=(2, 3))
        """
        zeros, dims, ones = _axes(len(box.start))
        return Piece(box, stored, zeros if start is None else start, dims, ones)

    @property
    def hull(self) -> Box:
        """Return the smallest box of the stored tensor that holds all elements of the piece."""
        stop = [first + 1 for first in self.start]
        for size, dim, step in zip(self.box.shape, self.dims, self.steps, strict=True):
            if dim is not None:
                stop[dim] += (size - 1) * step
        return Box(self.start, tuple(stop))

    @property
    def dense(self) -> bool:
        """Return whether every element of the hull belongs to the piece."""
        return all(step == 1 for step in self.steps)

    @property
    def ordered(self) -> bool:
        """Return whether the elements are those of the hull in the same order."""
        along = [dim for dim in self.dims if dim is not None]
        return self.dense and along == sorted(along)

    def reversed(self, name: Other) -> Piece[Other]:
        """Return where the elements of the stored tensor lie in the tensor ``name`` that the box is of.

        >>> Piece.plain(Box((4,), (6,)), "w").reversed("whole")
        Piece(box=Box(start=(0,), stop=(2,)), stored='whole', start=(4,), dims=(0,), steps=(1,))
        """
        assert self.dense, self
        dims = tuple(self.dims.index(dim) if dim in self.dims else None for dim in range(len(self.start)))
        return Piece(self.hull, name, self.box.start, dims, (1,) * len(dims))

    def narrow(self, box: Box) -> Piece[Holder] | None:
        """Return the part of the piece that is in ``box``, or ``None`` if there is none."""
        overlap = self.box.intersect(box)
        if overlap is None or overlap == self.box:
            return None if overlap is None else self
        start = [*self.start]
        for low, first, dim, step in zip(overlap.start, self.box.start, self.dims, self.steps, strict=True):
            if dim is not None:
                start[dim] += (low - first) * step
        return Piece(overlap, self.stored, tuple(start), self.dims, self.steps)

    def through(self, part: Piece[Other]) -> Piece[Other] | None:
        """Return where the elements lie that ``part`` holds, a piece of the tensor ``stored``; or ``None``.

        >>> even = Piece(Box((0,), (4,)), "w", (0,), (0,), (2,))
        >>> even.through(Piece.plain(Box((3,), (7,)), "file"))
        Piece(box=Box(start=(2,), stop=(4,)), stored='file', start=(1,), dims=(0,), steps=(2,))
        """
        # Along each dim the stored indices are start, start + step, ...; those in a box are again such a row.
        low, high, start, outer = [*self.box.start], [*self.box.stop], [*self.start], part.box
        for own, (dim, step) in enumerate(zip(self.dims, self.steps, strict=True)):
            if dim is not None:
                skipped = max(0, -((start[dim] - outer.start[dim]) // step))
                high[own] = min(high[own], low[own] - (start[dim] - outer.stop[dim]) // step)
                low[own] += skipped
                start[dim] += skipped * step
                if low[own] >= high[own]:
                    return None
        if any(not a <= at < b for a, at, b in zip(outer.start, start, outer.stop, strict=True)):
            return None  # outside in a dim that nothing runs along
        place = [*part.start]
        for at, first, dim, step in zip(start, outer.start, part.dims, part.steps, strict=True):
            if dim is not None:
                place[dim] += (at - first) * step
        dims = [None if dim is None else part.dims[dim] for dim in self.dims]
        steps = [
            1 if dim is None else step * part.steps[dim]
            for dim, step in zip(self.dims, self.steps, strict=True)
        ]
        return Piece(Box(tuple(low), tuple(high)), part.stored, tuple(place), tuple(dims), tuple(steps))

    def of(self, numbers: Tensor, first: Shape | None = None) -> Tensor:
        """Return the elements, in the shape of the box, as a view of the stored tensor ``numbers``.

        ``first``: the index in the stored tensor of the first element of ``numbers``, if it is a part of it.
        """
        strides = numbers.stride()
        steps = [
            0 if dim is None else strides[dim] * step for dim, step in zip(self.dims, self.steps, strict=True)
        ]
        at = self.start if first is None else map(sub, self.start, first)
        offset = numbers.storage_offset() + sum(map(mul, at, strides))
        return numbers.as_strided(self.box.shape, steps, offset)
