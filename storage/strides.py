"""Compute which bytes of a row-major tensor a box covers: a regular grid of equal runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from ..parallel_state import Box


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
