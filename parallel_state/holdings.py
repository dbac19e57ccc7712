"""Compute which rank holds which box of each tensor, from declarations and a layout, without any
collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .boxes import Box
from .declaration import Declaration
from .layout import Layout


@dataclass(frozen=True, slots=True)
class Holding:
    """State that ``rank`` holds ``box`` of a tensor. Exactly one of the ranks with the same box is the
    owner.
    """

    rank: int
    box: Box
    owner: bool


def holdings(
    stages: Sequence[Mapping[str, Declaration]],
    layout: Layout,
    *,
    sharded: bool = True,
    replicas: bool = False,
) -> dict[str, list[Holding]]:
    """Return, for every tensor, which rank holds which box, without padding.

    ``stages``: the declarations of each pipeline stage (``Family.declarations``). ``sharded`` also cuts over
    the data axes, as between training steps. ``replicas`` also lists ranks that hold copies; a rank that
    holds only padding is then listed with an empty box. The owners' boxes are disjoint and cover each tensor.
    """
    assert len(stages) == layout.pipeline, (len(stages), layout)
    found: dict[str, list[Holding]] = {name: [] for stage in stages for name in stage}
    for rank, at in enumerate(layout.places()):
        for name, declaration in stages[at.pipeline].items():
            owner = declaration.owner(layout, at, sharded=sharded)
            if not owner and not replicas:
                continue
            box = declaration.shard_box(layout, at) if sharded else declaration.box(layout, at)
            box = declaration.true_part(box)
            if box.size or replicas:
                found[name].append(Holding(rank, box, owner))
    return found


def parts(wanted: Box, held: Iterable[Holding]) -> list[tuple[Holding, Box]]:
    """Return the owners of ``wanted`` with their parts, which cover ``wanted`` and do not overlap."""
    found = []
    for holding in held:
        overlap = holding.box.intersect(wanted) if holding.owner else None
        if overlap is not None:
            found.append((holding, overlap))
    assert sum(overlap.size for _, overlap in found) == wanted.size, (wanted, found)
    return found
