"""Group transfers that read the same bytes, order the groups for threads, and cut each into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, zip_longest

import torch

from ...parallel_state import Box
from ...storage.catalog import Key
from ...storage.dtypes import TORCH
from ...storage.safetensors_writer import TensorWriter
from ...storage.strides import blocks
from .plan import Transfer

#: Transfers that share their sources, each with the file whose tensor of that name has the box's shape.
Group = list[tuple[Transfer, TensorWriter]]


@dataclass(frozen=True, slots=True)
class Block:
    """List the parts of a block, and what they need: one smallest box of each stored tensor."""

    parts: list[tuple[Transfer, TensorWriter, Box]]
    needed: dict[Key, Box]


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


def cut_into_blocks(group: Group, nbytes: int) -> Iterator[Block]:
    """Yield what a group makes in blocks of at most about ``nbytes``, and what each is made of."""
    transfers = [transfer for transfer, _ in group]
    most = nbytes // max(dtype_of(piece.stored).itemsize for each in transfers for piece in each.pieces)
    for box in (box for slab in _slabs(transfers) for box in blocks(slab, most)):
        parts = [(*pair, part) for pair in group if (part := pair[0].box.intersect(box))]
        needed: dict[Key, Box] = {}
        for transfer, _, part in parts:
            for whole in transfer.pieces:
                if (piece := whole.narrow(part)) is not None:
                    hull, place = piece.hull, piece.stored
                    needed[place] = needed[place].around(hull) if place in needed else hull
        yield Block(parts, needed)


def dtype_of(stored: Key) -> torch.dtype:
    """Return the type of a stored tensor."""
    return TORCH[stored.file.tensors[stored.key].dtype]


def _slabs(group: Sequence[Transfer]) -> Iterator[Box]:
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
