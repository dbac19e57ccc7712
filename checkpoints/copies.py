"""Plan which box of which file goes where, for a read, a conversion or a reshard. No file is touched here.

A *catalog* says where each whole tensor lies: one stored box for a Hugging Face folder, several for a sharded
checkpoint. *Links* say which of our tensors is which of Hugging Face's. ``copies`` plans one wanted box from
the two, and ``join`` makes it of what the copies read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models import Link
from ..parallel_state import BadCheckpoint, Box
from .grid import Grid


@dataclass(frozen=True, slots=True)
class Stored:
    """Say that ``box`` of a whole tensor is stored in file number ``file``, alone, as the tensor ``key``."""

    file: int
    key: str
    box: Box


@dataclass(frozen=True, slots=True)
class GridParts:
    """Hold the parts of a tensor that a grid states (see ``Grid``); each is computed when it is asked for.

    ``numbers``: the number of each rank's file.
    """

    key: str
    shape: tuple[int, ...]
    grid: Grid
    numbers: Mapping[int, int]

    def __len__(self) -> int:
        return self.grid.number(self.shape)

    def __iter__(self) -> Iterator[Stored]:
        return self.touching(Box.whole(self.shape))

    def touching(self, box: Box) -> Iterator[Stored]:
        """Yield the parts that hold elements of ``box``."""
        for rank, part in self.grid.parts(self.shape, box):
            yield Stored(self.numbers[rank], self.key, part)


@dataclass(frozen=True, slots=True)
class Whole:
    """Describe a whole tensor: its true shape, its dtype by the format's name, its parts (owners only)."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Stored, ...] | GridParts

    def near(self, box: Box) -> Iterable[Stored]:
        """Return parts among which are all that hold elements of ``box``."""
        return self.parts.touching(box) if isinstance(self.parts, GridParts) else self.parts


Catalog = Mapping[str, Whole]


@dataclass(frozen=True, slots=True)
class Copy:
    """Say that box ``source`` of tensor ``key`` in file ``file`` becomes box ``target`` of the wanted whole.

    ``source`` counts from the stored tensor's own corner, ``target`` from the whole tensor's. ``transpose``:
    the copy is transposed.
    """

    file: int
    key: str
    source: Box
    target: Box
    transpose: bool


class Links:
    """Hold a model's links in one direction: from the names that are wanted to the names that are stored."""

    def __init__(self, links: Iterable[Link] | None, *, to_hf: bool = False) -> None:
        self._to_hf = to_hf
        self._by_wanted: dict[str, list[Link]] | None = None if links is None else defaultdict(list)
        for link in links or ():
            if link.copy and not to_hf:  # read once, where it is not a copy
                continue
            assert self._by_wanted is not None
            self._by_wanted[link.hf if to_hf else link.ours].append(link)

    def stored_name(self, name: str) -> str:
        """Return one of the stored tensors that ``name`` is made of."""
        if self._by_wanted is None:
            return name
        link = self._by_wanted[name][0]
        return link.ours if self._to_hf else link.hf

    def sources(self, name: str, wanted: Box) -> Iterable[tuple[str, Box, Link | None]]:
        """Yield the stored tensors that hold ``wanted``, each with its box; without links, the same name."""
        if self._by_wanted is None:
            yield name, wanted, None
            return
        for link in self._by_wanted.get(name, ()):
            overlap = wanted.intersect(link.hf_box if self._to_hf else link.ours_box)
            if overlap is not None:
                yield (
                    (link.ours, link.to_ours(overlap), link)
                    if self._to_hf
                    else (
                        link.hf,
                        link.to_hf(overlap),
                        link,
                    )
                )

    def back(self, link: Link | None, stored: Box) -> Box:
        """Return a box of the stored tensor in the wanted tensor's coordinates."""
        if link is None:
            return stored
        return link.to_hf(stored) if self._to_hf else link.to_ours(stored)


def copies(name: str, wanted: Box, catalog: Catalog, links: Links) -> list[Copy]:
    """Return what to copy so that every element of ``wanted`` is set exactly once.

    Raises ``BadCheckpoint`` for a tensor that the catalog lacks or holds only in part.
    """
    found: list[Copy] = []
    covered = 0
    for stored_name, box, link in links.sources(name, wanted):
        whole = catalog.get(stored_name)
        if whole is None:
            raise BadCheckpoint("checkpoint", stored_name, expected="a tensor", found="none of that name")
        for part in whole.near(box):
            overlap = box.intersect(part.box)
            if overlap is None:
                continue
            target = links.back(link, overlap)
            transpose = link is not None and link.transpose
            found.append(Copy(part.file, part.key, overlap.within(part.box), target, transpose))
            covered += overlap.size
    if covered != wanted.size:
        raise BadCheckpoint(
            "checkpoint",
            name,
            expected=f"each of {wanted.size:,} elements once",
            found=f"{covered:,}",
            todo="The files do not cover this tensor: it is incomplete or overlaps itself",
        )
    return found


def turned(copy: Copy, numbers: Tensor, box: Box) -> Tensor:
    """Give numbers as they are stored the orientation and shape of ``box``, a part of the copy's target."""
    reverse = range(numbers.ndim)[::-1]
    return (numbers.permute(*reverse) if copy.transpose else numbers).view(box.shape)


def join(
    box: Box, pieces: Sequence[tuple[Box, Tensor]], empty: Callable[[torch.dtype], Tensor]
) -> tuple[Tensor, bool]:
    """Make ``box`` of pieces of it; also return whether that is the one piece itself, not copied.

    ``empty`` gives the memory for several.
    """
    first = pieces[0][1]
    if len(pieces) == 1 and first.is_contiguous():
        return first, True
    made = empty(first.dtype)
    for part, numbers in pieces:
        made[part.within(box).slices] = numbers
    return made, False
