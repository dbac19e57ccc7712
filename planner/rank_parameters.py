"""What one rank holds of a model's parameters, counted from their declarations."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..parallel_state import Coordinates, Declaration, Layout

_BLOCK = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class RankParameters:
    """Numbers of elements. ``groups`` are what FSDP gathers at once: each block, and the rest (``""``)."""

    #: Of this stage, by the tensor axis alone: what a rank computes with.
    stage: int
    #: Between steps, after FSDP cut dim 0 over the data axes.
    stored: int
    #: The two again, of what is trained.
    trained: int
    trained_stored: int
    groups: Mapping[str, int]
    #: Of these what is trained: whose gradients are summed together.
    trained_groups: Mapping[str, int]
    #: Numbers that no gradient moves, whole on every rank, of ``BUFFER_DTYPE``.
    buffers: int

    @property
    def root(self) -> int:
        return self.groups.get("", 0)

    @property
    def largest_block(self) -> int:
        return _largest_block(self.groups)

    @property
    def trained_root(self) -> int:
        return self.trained_groups.get("", 0)

    @property
    def largest_trained_block(self) -> int:
        return _largest_block(self.trained_groups)


def _largest_block(groups: Mapping[str, int]) -> int:
    return max((size for name, size in groups.items() if name), default=0)


def group_of(name: str) -> str:
    """Of what FSDP gathers at once, the group that a parameter belongs to: its block's number, or ``""``."""
    found = _BLOCK.match(name)
    return found[1] if found else ""


def rank_parameters(
    stated: Mapping[str, Declaration],
    layout: Layout,
    at: Coordinates,
    *,
    frozen: Collection[str] = (),
) -> RankParameters:
    """Count the parameters of the stage whose declarations these are, for the rank at these coordinates.

    Buffers count beside them.
    """
    groups: dict[str, int] = {}
    trained_groups: dict[str, int] = {}
    stage = stored = trained = trained_stored = buffers = 0
    for name, declaration in stated.items():
        if declaration.buffer:
            buffers += declaration.box(layout, at).size
            continue
        here, kept = declaration.box(layout, at).size, declaration.shard_box(layout, at).size
        group = group_of(name)
        groups[group] = groups.get(group, 0) + here
        stage, stored = stage + here, stored + kept
        if name not in frozen:
            trained, trained_stored = trained + here, trained_stored + kept
            trained_groups[group] = trained_groups.get(group, 0) + here
    return RankParameters(stage, stored, trained, trained_stored, groups, trained_groups, buffers)
