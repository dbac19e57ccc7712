"""Say where a tensor lies in a file, which bytes a box of it covers, and whether boxes tile it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from operator import le
from typing import NoReturn

from ..parallel_state import BadCheckpoint, BadInput, Box
from .dtypes import BITS


@dataclass(frozen=True, slots=True)
class Runs:
    """Describe ``rows`` runs of ``length`` bytes: the first at ``offset``, each next ``stride`` bytes on."""

    offset: int
    rows: int
    stride: int
    length: int


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor of this shape.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class View:
    """Describe a tensor of a file: its dtype by safetensors' name, its shape, and its range of bytes.

    ``begin`` is the first byte of the element at index 0. ``steps``: how many elements further the next one
    lies, along each dim; ``None`` if they lie in one piece, row by row.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    steps: tuple[int, ...] | None = None

    @classmethod
    def strided(cls, dtype: str, shape: tuple[int, ...], begin: int, strides: tuple[int, ...]) -> "View":
        """Return the view of elements that lie so far from each other."""
        span = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True)) + 1
        end = begin + (span * BITS[dtype] // 8 if prod(shape) else 0)
        return cls(dtype, shape, begin, end, None if strides == contiguous(shape) else strides)

    @classmethod
    def row_major(cls, dtype: str, shape: tuple[int, ...], begin: int) -> "View":
        """Return the view of a tensor that lies in one piece from byte ``begin`` on."""
        return cls(dtype, shape, begin, begin + prod(shape) * BITS[dtype] // 8)

    def __setstate__(self, state: object) -> NoReturn:  # a pickle would move a view that was checked
        raise ValueError("a state for a tensor")

    @property
    def strides(self) -> tuple[int, ...]:
        """Return how many elements further the next one lies, along each dim."""
        return contiguous(self.shape) if self.steps is None else self.steps

    @property
    def nbytes(self) -> int:
        """Return the bytes from the first to the last element, those between them included."""
        return self.end - self.begin

    @property
    def itemsize(self) -> int:
        """Return the bytes of one element."""
        return BITS[self.dtype] // 8

    @property
    def nested(self) -> bool:
        """Return whether no two elements share bytes, as after slices, steps and permutations."""
        extent = 1
        steps = [(stride, n) for n, stride in zip(self.shape, self.strides, strict=True) if n > 1]
        for stride, count in sorted(steps):
            if stride < extent:
                return False
            extent = stride * count
        return True

    def narrow(self, box: Box) -> "View":
        """Return the part of the view in ``box``."""
        first = sum(start * stride for start, stride in zip(box.start, self.strides, strict=True))
        return self.strided(self.dtype, box.shape, self.begin + first * self.itemsize, self.strides)


def runs_of(
    shape: tuple[int, ...], box: Box, itemsize: int, strides: tuple[int, ...] | None = None
) -> Iterator[Runs]:
    """Yield the bytes of ``box`` in a tensor of ``shape``, in the order of its elements.

    A box that is whole in every dim but its first gives one run; a box of columns gives one ``Runs`` of many
    rows; only a box cut in three dims or more gives several. ``strides``, in elements: if not row-major.
    """
    assert len(shape) == len(box.start) and all(map(le, box.stop, shape)), (shape, box)
    if box.size == 0:
        return
    strides = contiguous(shape) if strides is None else strides
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    # A dim of one row is only an offset.
    steps = [(count, stride) for count, stride in zip(box.shape, strides, strict=True) if count > 1]
    length = 1
    while steps and steps[-1][1] == length:  # these elements follow those of the dims inside
        length *= steps.pop()[0]
    if not steps:
        yield Runs(first * itemsize, 1, length * itemsize, length * itemsize)
        return
    rows, stride = steps.pop()
    for index in product(*(range(0, count * outer, outer) for count, outer in steps)):
        yield Runs((first + sum(index)) * itemsize, rows, stride * itemsize, length * itemsize)


def blocks(box: Box, most: int) -> Iterator[Box]:
    """Yield the box in pieces of at most ``most`` elements (at least one), in order.

    Every piece is one run of the box seen as a tensor of its own, so that writing is sequential.
    """
    shape = box.shape
    dim = 0
    while dim < len(shape) - 1 and prod(shape[dim + 1 :]) > most:
        dim += 1
    if not shape or box.size == 0:
        yield box
        return
    step = max(1, most // max(1, prod(shape[dim + 1 :])))
    for index in product(*(range(box.start[d], box.stop[d]) for d in range(dim))):
        for start in range(box.start[dim], box.stop[dim], step):
            stop = min(start + step, box.stop[dim])
            yield Box(
                (*index, start, *box.start[dim + 1 :]),
                (*(i + 1 for i in index), stop, *box.stop[dim + 1 :]),
            )


@dataclass(frozen=True, slots=True)
class Flaw:
    """Say that ``box`` of the tensor is owned ``times`` times instead of once."""

    box: Box
    times: int

    def __str__(self) -> str:
        place = ", ".join(f"{a}:{b}" for a, b in zip(self.box.start, self.box.stop, strict=True))
        return f"[{place}] owned {'by nobody' if self.times == 0 else f'{self.times} times'}"


def first_flaw(whole: Box, boxes: Sequence[Box]) -> Flaw | None:
    """Return the first part of ``whole`` that is not in exactly one of ``boxes``; parts outside do not count.

    The cost is about ``n log n`` for the grids that layouts make: it sweeps slabs between cuts, dim by dim.
    """
    overlaps = [part for box in boxes if (part := box.intersect(whole)) is not None]
    return _sweep(whole, overlaps, 0) if whole.size else None


def check_coverage(
    where: object,
    name: str,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    *,
    replicas: Sequence[Box] = (),
    kind: type[BadInput] = BadCheckpoint,
) -> None:
    """Refuse, naming tensor and box, unless all boxes lie inside ``shape`` and ``boxes`` own each element
    once.
    """
    for box in (*boxes, *replicas):
        if len(box.stop) != len(shape) or not all(map(le, box.stop, shape)):
            expected, actual = f"boxes inside {list(shape)}", f"one up to {list(box.stop)}"
            raise kind(where, name, expected=expected, found=actual)
    if flaw := first_flaw(Box.whole(shape), boxes):
        raise kind(where, name, expected="each element owned exactly once", found=str(flaw))


def _sweep(whole: Box, boxes: Sequence[Box], dim: int) -> Flaw | None:
    """Return the first flaw in ``dim`` or a later dim; in earlier dims all ``boxes`` span ``whole``."""
    if len(boxes) == 1 and boxes[0] == whole:
        return None
    if not boxes or dim == len(whole.start):
        return None if len(boxes) == 1 else Flaw(whole, len(boxes))
    cuts = {whole.start[dim], whole.stop[dim]}
    for box in boxes:
        cuts.add(box.start[dim])
        cuts.add(box.stop[dim])
    waiting = sorted(boxes, key=lambda box: box.start[dim], reverse=True)
    active: list[Box] = []
    for begin, end in pairwise(sorted(cuts)):
        active = [box for box in active if box.stop[dim] >= end]
        while waiting and waiting[-1].start[dim] == begin:
            active.append(waiting.pop())
        slab = _with(whole, dim, begin, end)
        if flaw := _sweep(slab, [_with(box, dim, begin, end) for box in active], dim + 1):
            return flaw
    return None


def _with(box: Box, dim: int, begin: int, end: int) -> Box:
    return box.narrow(dim, begin - box.start[dim], end - box.start[dim])
