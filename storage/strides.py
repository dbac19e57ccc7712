"""Compute which bytes of a row-major tensor a box covers: a regular grid of equal runs."""

from __future__ import annotations

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


def runs_of(shape: tuple[int, ...], box: Box, itemsize: int) -> Iterator[Runs]:
    """Yield the bytes of ``box`` in a tensor of ``shape``, in the order of its elements.

    A box that is whole in every dim but its first gives one run; a box of columns gives one ``Runs`` of many
    rows; only a box cut in three dims or more gives several.
    """
    assert len(shape) == len(box.start) and all(b <= n for b, n in zip(box.stop, shape, strict=True)), (
        shape,
        box,
    )
    if box.size == 0:
        return
    inner = len(shape)  # dims from here on are whole, so they are one run together with the dim before
    while inner and box.start[inner - 1] == 0 and box.stop[inner - 1] == shape[inner - 1]:
        inner -= 1
    if inner:
        inner -= 1
    below = prod(shape[inner + 1 :]) * itemsize
    extent = box.shape[inner] if shape else 1
    first, length = (box.start[inner] if shape else 0) * below, extent * below
    strides = [prod(shape[dim + 1 :]) * itemsize for dim in range(inner)]
    rows_dim = inner - 1
    while rows_dim > 0 and box.shape[rows_dim] == 1:
        rows_dim -= 1  # a dim of one row is an offset; the rows worth a loop lie further out
    if rows_dim < 0:
        yield Runs(first, 1, length, length)
        return
    outer = [dim for dim in range(inner) if dim != rows_dim]
    for index in product(*(range(box.start[dim], box.stop[dim]) for dim in outer)):
        at = sum(i * strides[dim] for i, dim in zip(index, outer, strict=True))
        at += box.start[rows_dim] * strides[rows_dim] + first
        if box.shape[rows_dim] == 1:
            yield Runs(at, 1, length, length)
        else:
            yield Runs(at, box.shape[rows_dim], strides[rows_dim], length)


def is_one_run(shape: tuple[int, ...], box: Box) -> bool:
    """Return whether the box is one contiguous stretch of the tensor's bytes."""
    if box.size == 0:
        return True
    leading = 0
    while leading < len(shape) and box.shape[leading] == 1:
        leading += 1
    return all(extent == n for extent, n in zip(box.shape[leading + 1 :], shape[leading + 1 :], strict=True))


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
