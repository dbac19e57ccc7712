"""Plan any rank of any layout from one block of each kind, because most blocks of a model are alike.

A model of 126 equal blocks is built once on the meta device to learn its kinds. After that a layout costs one
block of each kind and the two ends, whatever the number of blocks and ranks; and layouts that cut a block
alike (tensor, context, expert) share even these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..layers import Scaling, Stage, all_stages
from ..models import Family, ModelConfig
from ..parallel_state import Layout, ParallelState
from ..simulation.kinds_of_blocks import block_kinds, one_block_of_each_kind
from ..simulation.model_flops import TokenFlops, flops_of_token
from ..simulation.pieces import ModelPieces
from .rank_parameters import Group, RankParameters, count_module, zoo_parameters
from .stage_costs import StageCost, stage_cost
from .step_shape import Work

if TYPE_CHECKING:
    from ..models import CausalLM

#: Kinds of blocks, each with how many a stage holds.
Numbers = tuple[tuple[int, int], ...]


class SampledModel:
    """Hold one block of each kind of a model, and its ends, for all layouts that cut a block alike.

    The results are those of ``rank_parameters`` and ``stage_costs`` on the built stages. Shared: ``sampled``
    returns the same object for the same arguments. ``among``: returns that of as many context ranks.
    """

    def __init__(
        self, family: Family, model: CausalLM, among: Callable[[int], SampledModel] | None = None
    ) -> None:
        self.family, self.config, self._model = family, model.config, model
        self.kinds = block_kinds(family, model.config)
        self._blocks: dict[int, nn.Module] = {}
        for number, kind in enumerate(self.kinds):
            self._blocks.setdefault(kind, self._model.layers[str(number)])
        self._stages: dict[object, tuple[Stage, tuple[Numbers, ...]]] = {}
        self._shapes: dict[object, list[tuple[int, ...]]] = {}
        self._shape_numbers: dict[object, int] = {}
        self._counted: dict[object, Group] = {}
        self._held: dict[object, RankParameters] = {}
        self._of_ranks = among
        self.pieces = ModelPieces(model, model.state, None if among is None else self._among)
        self._costs: dict[object, StageCost] = {}

    def _stage(self, state: ParallelState, split: Sequence[int] | None) -> tuple[Stage, tuple[Numbers, ...]]:
        """Return what a rank holds of the blocks, and how many of each kind are in each of its stages."""
        layout, counts = state.layout, split and tuple(split)
        key = layout.pipeline, layout.virtual_stages, layout.v_shape, state.at.pipeline, counts
        if key not in self._stages:
            stage = Stage.of(len(self.kinds), split=split, state=state)
            parts = [Counter(self.kinds[number] for number in part.blocks) for part in stage.parts]
            self._stages[key] = stage, tuple(tuple(sorted(kinds.items())) for kinds in parts)
        return self._stages[key]

    def shapes(
        self, layout: Layout, split: Sequence[int] | None, checkpoint_every: int
    ) -> list[tuple[int, ...]]:
        """Return, for each pipeline rank, a number for each of its stages; equal numbers are stages alike.

        Stages are alike if they have as many blocks of each kind, at the same places among
        ``checkpoint_every`` blocks, the same ends, and beside them, on their rank, the same kinds and ends.
        """
        key = layout.pipeline, layout.virtual_stages, layout.v_shape, split and tuple(split), checkpoint_every
        if key not in self._shapes:
            stages = all_stages(len(self.kinds), layout.stages, split)
            self._shapes[key] = []
            for rank in range(layout.pipeline):
                parts = [stages[number] for number in layout.stages_of(rank)]
                ends = any(part.first for part in parts), any(part.last for part in parts)
                around = frozenset(self.kinds[n] for part in parts for n in part.blocks), ends
                numbers = []
                for part in parts:
                    kinds = frozenset(
                        Counter((self.kinds[n], n % checkpoint_every) for n in part.blocks).items()
                    )
                    shape = kinds, part.first, part.last, around
                    numbers.append(self._shape_numbers.setdefault(shape, len(self._shape_numbers)))
                self._shapes[key].append(tuple(numbers))
        return self._shapes[key]

    def parameters(self, state: ParallelState, split: Sequence[int] | None = None) -> RankParameters:
        """Count the parameters of a rank."""
        stage, numbers = self._stage(state, split)
        key = _place(state), numbers, stage.first, stage.last
        if key not in self._held:
            parts = [[(self._count(state, self._blocks[kind]), n) for kind, n in part] for part in numbers]
            further = self._model.mtp.values() if stage.last else ()
            parts[-1] += [(self._count(state, block), 1) for block in further]
            count = partial(self._count, state)
            self._held[key] = zoo_parameters(self._model, stage, parts, count)
        return self._held[key]

    def group(self, number: int, state: ParallelState) -> Group:
        """Count the parameters of the block of this number on the rank of ``state``."""
        return self._count(state, self.block(number))

    def _count(self, state: ParallelState, module: nn.Module, ends: bool | None = None) -> Group:
        key = id(module), _place(state), ends
        if key not in self._counted:
            self._counted[key] = count_module(state, module, ends)
        return self._counted[key]

    def costs(self, work: Work, split: Sequence[int] | None = None) -> list[StageCost]:
        """Return the costs of each stage of the rank of ``work``. Stages alike share one object."""
        stage, _ = self._stage(work.state, split)
        checkpoint_every, costs = work.checkpoint_every, list[StageCost]()
        for part in stage.parts:
            kinds = tuple(map(self.kinds.__getitem__, part.blocks))
            place = checkpoint_every, part.blocks[0] % checkpoint_every
            key = kinds, place, part.first, part.last, work.batch, work.loss_chunk, work.loss_sums
            if key not in self._costs:
                self._costs[key] = self._cost(work, part)
            costs.append(self._costs[key])
        return costs

    def _cost(self, work: Work, part: Stage) -> StageCost:
        """Return the costs of one stage of a rank."""
        blocks = {number: self.block(number) for number in part.blocks}
        kinds = {number: self.kinds[number] for number in part.blocks}
        return stage_cost(work, part, blocks, kinds, self.pieces)

    def flops(self, sequence_length: int) -> TokenFlops:
        """Count the FLOPs of a token of the whole model."""
        return flops_of_token(self.family, self.config, sequence_length)

    def informed(self, work: Work, split: Sequence[int] | None) -> Work:
        """Return the step as it is: between all stages go hidden states."""
        return work

    def _among(self, ranks: int, kind: int) -> tuple[ModelPieces, nn.Module]:
        """Return the pieces of the model on so many context ranks, and its block of this kind."""
        assert self._of_ranks is not None
        sample = self._of_ranks(ranks)
        return sample.pieces, sample._blocks[kind]

    def block(self, number: int) -> nn.Module:
        """Return a block like the one of this number."""
        return self._blocks[self.kinds[number]]


def _place(state: ParallelState) -> tuple[object, ...]:
    """Return all of a layout and of a rank's place in it that the counts of a module's parameters depend on:
    neither the pipeline nor the replicas.
    """
    layout, at = state.layout, state.at
    place = layout.tensor, at.tensor, layout.data_sizes()[1], layout.data_place(at)[1]
    if layout.expert == 1:
        return place
    return *place, layout.expert, layout.data_sizes(experts=True)[1], layout.data_place(at, experts=True)[1:]


def sampled(
    family: Family,
    config: ModelConfig,
    layout: Layout,
    *,
    frozen: torch.dtype | None = None,
    float8: Scaling | None = None,
) -> SampledModel:
    """Return the sampled model for this layout; see ``one_block_of_each_kind``."""
    model = one_block_of_each_kind(family, config, layout, frozen=frozen, float8=float8)
    return _sampled(family, model, frozen, float8)


@lru_cache(maxsize=64)
def _sampled(
    family: Family, model: CausalLM, frozen: torch.dtype | None, float8: Scaling | None
) -> SampledModel:
    def among(ranks: int) -> SampledModel:
        cut = replace(model.state.layout, context=ranks)
        return sampled(family, model.config, cut, frozen=frozen, float8=float8)

    return SampledModel(family, model, among)
