"""Compute which bytes of a tensor a box covers, a regular grid of equal runs; check that boxes tile it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from ..parallel_state import BadCheckpoint, BadInput, Box


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


def runs_of(
    shape: tuple[int, ...], box: Box, itemsize: int, strides: tuple[int, ...] | None = None
) -> Iterator[Runs]:
    """Yield the bytes of ``box`` in a tensor of ``shape``, in the order of its elements.

    A box that is whole in every dim but its first gives one run; a box of columns gives one ``Runs`` of many
    rows; only a box cut in three dims or more gives several. ``strides``, in elements: of a tensor that is
    not row-major.
    """
    assert len(shape) == len(box.start) and all(b <= n for b, n in zip(box.stop, shape, strict=True)), (
        shape,
        box,
    )
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

    Every piece is one run of the box seen as a tensor of its own, so writing the pieces in turn is
    sequential.
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


def slabs(whole: Box, most: int) -> Iterator[Box]:
    """Yield the box in slabs of whole rows of its first dim, each of at most ``most`` elements or one row."""
    if not whole.start:
        yield whole
        return
    count = whole.shape[0]
    rows = max(1, most // max(1, whole.size // max(1, count)))
    for start in range(0, count, rows):
        yield whole.narrow(0, start, min(start + rows, count))


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

    The cost is about ``n log n`` for the grids that layouts make: it sweeps slabs between cuts, one dim after
    the other.
    """
    inside = [part for box in boxes if (part := box.intersect(whole)) is not None]
    return _sweep(whole, inside, 0) if whole.size else None


def check_coverage(
    where: object,
    name: str,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    *,
    kind: type[BadInput] = BadCheckpoint,
) -> None:
    """Refuse, naming tensor and box, unless ``boxes`` lie inside ``shape`` and own each element once."""
    for box in boxes:
        if len(box.stop) != len(shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
            raise kind(
                where, name, expected=f"boxes inside {list(shape)}", found=f"one up to {list(box.stop)}"
            )
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
        if len(active) == 1 and _spans(active[0], whole, dim + 1):
            continue  # nearly every slab is of this kind
        slab = _with(whole, dim, begin, end)
        if flaw := _sweep(slab, [_with(box, dim, begin, end) for box in active], dim + 1):
            return flaw
    return None


def _spans(box: Box, whole: Box, dim: int) -> bool:
    return box.start[dim:] == whole.start[dim:] and box.stop[dim:] == whole.stop[dim:]


def _with(box: Box, dim: int, begin: int, end: int) -> Box:
    return box.narrow(dim, begin - box.start[dim], end - box.start[dim])
