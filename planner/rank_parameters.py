"""Count the parameters that one rank holds of a model, from their declarations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import ceil
from operator import attrgetter

from torch import nn

from ..layers import numbered_blocks, stage_parts, unshared_blocks
from ..parallel_state import Declaration, ParallelState, declarations


@dataclass(frozen=True, slots=True)
class Group:
    """Count the elements of parameters that FSDP gathers at once: those of a block, or of the rest.

    ``unsharded``: cut along the tensor and expert axes only, as a rank computes with them. ``sharded``: as
    they lie between steps, cut by FSDP over the data axes. ``padded``: the shard that each data rank sends,
    padded to equal sizes. ``apart``: the shard of stacked experts, if FSDP gathers them by themselves, over
    the ranks that hold the same experts; it is not in ``padded``.
    """

    unsharded: int = 0
    sharded: int = 0
    padded: int = 0
    apart: int = 0
    #: The same four counts of trained parameters only.
    trained: int = 0
    trained_sharded: int = 0
    trained_padded: int = 0
    trained_apart: int = 0
    #: Trained, sharded, and summed over the tensor ranks; trained, sharded, and held at both ends.
    partial: int = 0
    ends: int = 0
    #: How many parameters these two are the elements of.
    partial_tensors: int = 0
    end_tensors: int = 0
    #: Numbers that no gradient moves, whole on every rank.
    buffers: int = 0
    buffer_bytes: int = 0
    #: Bytes of the buffers and of the stored parameters that are not trained.
    fixed_bytes: int = 0
    #: The elements, as ``unsharded``, of parameters that FSDP cuts along another dim than the first.
    recut: int = 0
    #: The elements, as ``unsharded``, of the largest trained parameter, and of the last one; a sum of groups
    #: has those of the largest and of the last of all.
    largest: int = 0
    last: int = 0

    def times(self, number: int) -> Group:
        """Return the counts of ``number`` groups like this one."""
        counts = [number * count for count in _counts(self)]
        return Group(*[*counts, self.largest, self.last])

    def __add__(self, group: Group) -> Group:
        counts = [count + other for count, other in zip(_counts(self), _counts(group), strict=True)]
        return Group(*[*counts, max(self.largest, group.largest), group.last or self.last])


_counts = attrgetter(*(field.name for field in fields(Group)[:-2]))


def _count_parameter(
    parameter: nn.Parameter, declaration: Declaration, state: ParallelState, ends: bool | None
) -> Group:
    layout, at = state.layout, state.at
    box, dim = declaration.box(layout, at), declaration.shard_dim(layout)
    if declaration.dtype:
        size = box.size * declaration.dtype.itemsize
        return Group(buffers=box.size, buffer_bytes=size, fixed_bytes=size)
    rows, shards = (box.shape or (1,))[dim], layout.data_sizes(declaration.experts)[1]
    stored, piece = declaration.shard_box(layout, at).size, ceil(rows / shards) * (box.size // rows)
    sent = "apart" if declaration.experts and layout.expert > 1 else "padded"
    counts = {"unsharded": box.size, "sharded": stored, sent: piece, "recut": box.size * (dim > 0)}
    if not parameter.requires_grad:
        return Group(**counts, fixed_bytes=stored * parameter.dtype.itemsize)
    apart = layout.pipeline > 1 and not layout.v_shape  # in a V one rank holds both ends
    at_ends = apart and (declaration.ends if ends is None else ends)
    partial = layout.tensor > 1 and "tensor" in declaration.partial
    counts |= {"trained": box.size, "trained_sharded": stored, f"trained_{sent}": piece}
    counts |= {"partial": stored * partial, "partial_tensors": int(partial)}
    counts |= {"ends": stored * at_ends, "end_tensors": int(at_ends)}
    return Group(**counts, largest=box.size, last=box.size)


@dataclass(frozen=True)
class RankParameters:
    """Hold the groups of a rank's parameters: the ``root``, which is in no block, and for each of the rank's
    ``stages`` its blocks, each different one once with how many there are.

    ``ends``: what the model's first and its last stage use of the root, where a rank of a V holds both.
    ``exit``: how many trained elements of the root the model's last stage uses; they have a gradient before
    any block has one. ``tied``: those of them that the embedding uses, too, in the same backward; the first
    part of their gradient waits for the second one.
    """

    root: Group
    stages: tuple[tuple[tuple[Group, int], ...], ...]
    ends: tuple[Group, ...] = ()
    exit: int = 0
    tied: int = 0
    #: Terms of the loss of the model: of the next token, and of multi-token prediction if there is some.
    terms: int = 1
    #: Returns the group of the block of a number, in a model whose blocks are planned apart.
    group: Callable[[int], Group] = field(default=dict[int, Group]().__getitem__, compare=False, repr=False)

    @cached_property
    def blocks(self) -> tuple[tuple[Group, int], ...]:
        """Return each different block of the rank once, with how many there are."""
        counts: Counter[Group] = Counter()
        for blocks in self.stages:
            for group, number in blocks:
                counts[group] += number
        return tuple(counts.items())

    @cached_property
    def every(self) -> Group:
        """Return the sum of all groups."""
        return sum((group.times(number) for group, number in self.kinds), Group())

    @cached_property
    def kinds(self) -> tuple[tuple[Group, int], ...]:
        """Return each different group, the root first, with how many there are."""
        return ((self.root, 1), *self.blocks)

    def most(self, name: str) -> int:
        """Return the most of a count of ``Group`` that a block has."""
        return max((getattr(group, name) for group, _ in self.blocks), default=0)


def module_parameters(model: nn.Module, state: ParallelState) -> RankParameters:
    """Count the parameters of a module that is not the zoo's, which may be on the meta device."""
    named, blocks = dict(model.named_parameters()), unshared_blocks(model)
    paths = {module: path for path, module in model.named_modules()}
    block_of = {f"{paths[block]}.{name}": block for block in blocks for name, _ in block.named_parameters()}
    members = {module: list[tuple[nn.Parameter, Declaration]]() for module in (model, *blocks)}
    for name, declaration in declarations(model).items():
        if not state.layout.holds_alone:
            declaration.check_shared(name)
        members[block_of.get(name, model)].append((named[name], declaration))
    groups = {
        module: sum((_count_parameter(*weight, state, None) for weight in weights), Group())
        for module, weights in members.items()
    }
    counts = [Counter(groups[block] for block in part if block in groups) for part in _blocks_of_parts(model)]
    parts_of_rank = tuple(tuple(count.items()) for count in counts)
    return RankParameters(groups[model], parts_of_rank, exit=groups[model].trained)


def _blocks_of_parts(model: nn.Module) -> list[list[nn.Module]]:
    """Return the blocks of each stage that a user's module holds; all in the first one if their numbers are
    not those of its stages.
    """
    numbered, parts = numbered_blocks(model), stage_parts(model)
    if {*numbered} != {number for part in parts for number in part.blocks}:
        return [[*numbered.values()], *([] for _ in parts[1:])]
    return [[numbered[number] for number in part.blocks] for part in parts]


def parts_of_module(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters that each stage of a user's module may use: of its own blocks, and of none."""
    stages = _blocks_of_parts(model)
    of_stage = [{id(weight) for block in blocks for weight in block.parameters()} for blocks in stages]
    if not all(of_stage):  # it is not known whose the blocks are
        return [[*model.parameters()] for _ in stages]
    of_blocks = set().union(*of_stage)
    return [
        [weight for weight in model.parameters() if id(weight) in own or id(weight) not in of_blocks]
        for own in of_stage
    ]


def count_module(state: ParallelState, module: nn.Module, ends: bool | None = None) -> Group:
    """Count the parameters of a module on a rank.

    ``ends``: whether they are held at both ends of the pipeline, if the declarations do not say so.
    """
    named, declared = dict(module.named_parameters()), declarations(module).items()
    counts = (_count_parameter(named[name], declaration, state, ends) for name, declaration in declared)
    return sum(counts, Group())
