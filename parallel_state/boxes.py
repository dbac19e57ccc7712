"""Define a box: a rectangular part of a whole tensor, such as the part of one rank or of one file.

Plans make millions: ``map`` over operators, rather than generators, keeps each at a microsecond or two.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import add, le, lt, neg, sub


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
