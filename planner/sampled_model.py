"""Plan any rank of any layout from one block of each kind, because most blocks of a model are alike.

A model of 126 equal blocks is built once on the meta device to learn its kinds. After that a layout costs one
block of each kind and the two ends, whatever the number of blocks and ranks; and layouts that cut a block
alike (tensor, context, expert) share even these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..layers import Scaling, Stage, routers
from ..models import Family, ModelConfig
from ..parallel_state import Layout, ParallelState
from ..simulation.kinds_of_blocks import block_kinds, one_block_of_each_kind
from ..simulation.micro_batch import MicroBatch
from ..simulation.model_flops import TokenFlops, flops_of_token
from ..simulation.piece import Piece
from ..simulation.pieces import ModelPieces
from .rank_parameters import Group, RankParameters, count_module, zoo_parameters
from .stage_costs import Source, StageCost, stage_cost
from .step_shape import Work

if TYPE_CHECKING:
    from ..models import CausalLM


class PlannedModel(ABC):
    """Count what any rank of a model has, in all layouts that cut its layers alike.

    What was computed is remembered: ranks and stages that are alike have the same objects.
    """

    def __init__(self, family: Family, config: ModelConfig) -> None:
        self.family, self.config = family, config
        self._held: dict[object, RankParameters] = {}

    @abstractmethod
    def parameters(self, state: ParallelState, split: Sequence[int] | None = None) -> RankParameters:
        """Count the parameters of a rank."""

    @abstractmethod
    def costs(self, work: Work, split: Sequence[int] | None = None) -> list[StageCost]:
        """Return the costs of each stage of the rank of ``work``."""

    def flops(self, sequence_length: int) -> TokenFlops:
        """Count the FLOPs of a token of the whole model."""
        return flops_of_token(self.family, self.config, sequence_length)

    def informed(self, work: Work, split: Sequence[int] | None) -> Work:
        """Return the step with what a module's code says of it, and else as it is."""
        return work


class SampledModel(PlannedModel, Source):
    """Hold one block of each kind of a model, and its ends.

    The results are those of ``rank_parameters`` and ``stage_costs`` on the built stages. Shared: ``sampled``
    returns the same object for the same arguments. ``other``: returns that of another layout.
    """

    def __init__(
        self, family: Family, model: CausalLM, other: Callable[[Layout], SampledModel] | None = None
    ) -> None:
        PlannedModel.__init__(self, family, model.config)
        self._other, self._cut = other, model.state.layout
        Source.__init__(self, model, ModelPieces(model, model.state))
        self.kinds: tuple[int, ...] = block_kinds(family, model.config)
        #: The first block of each kind.
        self.blocks = {kind: model.layers[str(self.kinds.index(kind))] for kind in dict.fromkeys(self.kinds)}
        # What comes before the blocks and behind them is the same in any cut of rows and experts.
        if other is not None and self._cut.context * self._cut.expert > 1:
            self.ends = other(Layout(tensor=self._cut.tensor, sequence=self._cut.sequence)).pieces
        self._counted: dict[object, Group] = {}
        self._costs: dict[object, StageCost] = {}

    def block(self, number: int) -> nn.Module:
        """Return a block like the one of this number, or one of multi-token prediction."""
        return self.blocks[self.kinds[number]] if number < len(self.kinds) else self.model.mtp[str(number)]

    @cached_property
    def _uncut(self) -> SampledModel:
        """Return the same model with all experts on each rank: what holds none is the same there."""
        if self._other is None or self._cut.expert == 1:
            return self
        return self._other(replace(self._cut, expert=1, data_replicate=1))

    def piece(self, number: int, batch: MicroBatch, *, reached: bool) -> Piece:
        """Return the piece of a block; ``reached``: whether a backward comes to what it is given."""
        if self._uncut is not self and not [*routers(self.block(number))]:
            return self._uncut.piece(number, batch, reached=reached)
        return super().piece(number, batch, reached=reached)

    def tables(self, numbers: Sequence[int], batch: MicroBatch) -> Piece:
        """Return the piece of what these blocks share."""
        if self._uncut is not self:
            return self._uncut.tables(numbers, batch)
        return super().tables(numbers, batch)

    def parameters(self, state: ParallelState, split: Sequence[int] | None = None) -> RankParameters:
        """Count the parameters of a rank."""
        stage = Stage.of(len(self.kinds), split=split, state=state)
        parts = [Counter(map(self.kinds.__getitem__, part.blocks)) for part in stage.parts]
        numbers = tuple(tuple(sorted(kinds.items())) for kinds in parts)
        key = _place(state), numbers, stage.first, stage.last
        if key not in self._held:
            count = partial(self._count, state)
            groups = [[(count(self.blocks[kind]), n) for kind, n in part] for part in numbers]
            further = self.model.mtp.values() if stage.last else ()
            groups[-1] += [(count(block), 1) for block in further]
            self._held[key] = zoo_parameters(
                self.model, stage, groups, count, lambda number: count(self.block(number))
            )
        return self._held[key]

    def _count(self, state: ParallelState, module: nn.Module, ends: bool | None = None) -> Group:
        key = module, _place(state), ends
        if key not in self._counted:
            self._counted[key] = count_module(state, module, ends)
        return self._counted[key]

    def costs(self, work: Work, split: Sequence[int] | None = None) -> list[StageCost]:
        """Return the costs of each stage of the rank of ``work``. Stages alike share one object."""
        checkpoint_every, costs = work.checkpoint_every, list[StageCost]()
        for part in Stage.of(len(self.kinds), split=split, state=work.state).parts:
            kinds = tuple(map(self.kinds.__getitem__, part.blocks))
            place = checkpoint_every, part.blocks[0] % checkpoint_every
            key = kinds, place, part.first, part.last, work.batch, work.loss_chunk, work.loss_sums
            if key not in self._costs:
                self._costs[key] = stage_cost(work, part, self)
            costs.append(self._costs[key])
        return costs


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
    other = partial(sampled, family, model.config, frozen=frozen, float8=float8)
    return SampledModel(family, model, other)
