"""Define a piece: where the elements of one box of a tensor lie in another tensor, which holds them.

Tables of names, cuts into files and the plans of reads and conversions are all made of pieces. Positions are
counted in elements and never in bytes: packed tensors (FP8, MXFP4) have no strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import mul, sub
from typing import Generic, TypeVar

from torch import Tensor

from .boxes import Box

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
        low, high, start, inside = [*self.box.start], [*self.box.stop], [*self.start], part.box
        for own, (dim, step) in enumerate(zip(self.dims, self.steps, strict=True)):
            if dim is not None:
                skipped = max(0, -((start[dim] - inside.start[dim]) // step))
                high[own] = min(high[own], low[own] - (start[dim] - inside.stop[dim]) // step)
                low[own] += skipped
                start[dim] += skipped * step
                if low[own] >= high[own]:
                    return None
        if any(not a <= at < b for a, at, b in zip(inside.start, start, inside.stop, strict=True)):
            return None  # outside in a dim that nothing runs along
        place = [*part.start]
        for at, first, dim, step in zip(start, inside.start, part.dims, part.steps, strict=True):
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
