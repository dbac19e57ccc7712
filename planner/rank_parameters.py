"""Count the parameters that one rank holds of a model, from their declarations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..layers import find_blocks
from ..parallel_state import BUFFER_DTYPE, ParallelState, declarations


@dataclass(frozen=True)
class RankParameters:
    """Count elements. ``groups``: the elements that FSDP gathers at once, by block; ``""`` is the rest."""

    #: Of this stage, cut along the tensor axis only: a rank computes with these.
    stage: int
    #: Between steps, after FSDP cut dim 0 over the data axes.
    stored: int
    #: The same two counts of trained parameters only.
    trained: int
    trained_stored: int
    groups: Mapping[str, int]
    #: The trained elements of each group: their gradients are summed together.
    trained_groups: Mapping[str, int]
    #: Numbers that no gradient moves, whole on every rank.
    buffers: int
    #: Bytes of the buffers and of the stored parameters that are not trained.
    fixed_bytes: int

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


def gathered_groups(model: nn.Module) -> dict[str, str]:
    """Return, by a parameter's name, the name of the block with which FSDP gathers it, or ``""``."""
    found = dict.fromkeys((name for name, _ in model.named_parameters()), "")
    blocks = {id(block) for block in find_blocks(model)}
    for path, module in model.named_modules():
        if id(module) in blocks:
            found |= {f"{path}.{name}": path for name, _ in module.named_parameters()}
    return found


def rank_parameters(model: nn.Module, state: ParallelState) -> RankParameters:
    """Count the parameters of a rank's stage, which may be on the meta device. Buffers count beside them."""
    layout, at = state.layout, state.at
    named, group_of = dict(model.named_parameters()), gathered_groups(model)
    groups: dict[str, int] = {}
    trained_groups: dict[str, int] = {}
    stage = stored = trained = trained_stored = buffers = fixed = 0
    for name, declaration in declarations(model).items():
        if declaration.buffer:
            buffers += declaration.box(layout, at).size
            continue
        here, kept = declaration.box(layout, at).size, declaration.shard_box(layout, at).size
        group = group_of[name]
        groups[group] = groups.get(group, 0) + here
        stage, stored = stage + here, stored + kept
        if named[name].requires_grad:
            trained, trained_stored = trained + here, trained_stored + kept
            trained_groups[group] = trained_groups.get(group, 0) + here
        else:
            fixed += kept * named[name].dtype.itemsize
    fixed += buffers * BUFFER_DTYPE.itemsize
    return RankParameters(stage, stored, trained, trained_stored, groups, trained_groups, buffers, fixed)
