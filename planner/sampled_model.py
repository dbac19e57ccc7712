"""Plan any rank of any layout from one block of each kind, because most blocks of a model are alike.

A model of 126 equal blocks is built once on the meta device to learn its kinds. After that a layout costs one
block of each kind and the two ends, whatever the number of blocks and ranks; and layouts that cut a block
alike (tensor, context, expert) share even these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..layers import PinnedBackend, Scaling, Stage, routers, use_float8
from ..models import Family, ModelConfig
from ..parallel_state import Layout, ParallelState
from ..recipes.section import ParameterGroup
from ..simulation.kinds_of_blocks import block_kinds, one_block_of_each_kind, signature
from ..simulation.micro_batch import MicroBatch
from ..simulation.model_flops import TokenFlops, flops_of_token
from ..simulation.pieces import ModelPieces
from ..simulation.trace import Piece
from ..training.optimizer import freeze
from .rank_parameters import Group, RankParameters, count_module
from .stage_costs import StageCost
from .step_shape import Work

if TYPE_CHECKING:
    from ..models import CausalLM


@dataclass(frozen=True)
class Asked:
    """State what a recipe asks of a model, and do this in place: the groups of its parameters, how linears
    multiply in float8, and who computes attention; and in which dtype weights are that adapters leave as they
    are.
    """

    groups: tuple[tuple[str, ParameterGroup], ...] = ()
    float8: Scaling | None = None
    backend: PinnedBackend = "auto"
    frozen: torch.dtype | None = None

    def __call__(self, model: CausalLM) -> None:
        freeze(model, dict(self.groups))
        model.pin_attention(self.backend)
        if self.float8 is not None:
            use_float8(model, self.float8)

    @property
    def set_up(self) -> Asked | None:
        """Return what changes a model, if anything does."""
        return None if self == replace(NOTHING, frozen=self.frozen) else self


NOTHING = Asked()


class SampledModel:
    """Hold one block of each kind of a model, and its ends, to count what any rank of it has.

    Shared: ``sampled`` returns the same object for layouts that cut the layers alike. What was computed is
    remembered: ranks and stages that are alike have the same objects. ``other``: returns that of another
    layout. ``stage``: of a model that has all blocks of one rank, which is the only one that is planned.
    """

    def __init__(
        self,
        family: Family,
        model: CausalLM,
        other: Callable[[Layout], SampledModel] | None = None,
        stage: Stage | None = None,
        asked: Asked = NOTHING,
    ) -> None:
        self.family, self.config, self.model, self.stage = family, model.config, model, stage
        self._other, self._cut = other, model.state.layout
        #: The kind of each block by its number, and the first block of each kind.
        self.kinds: Mapping[int, Any]
        if stage is None:
            self.kinds = dict(enumerate(block_kinds(family, model.config, asked.set_up)))
        else:
            self.kinds = {number: signature(model.layers[str(number)]) for number in stage.blocks}
        self.blocks: dict[Any, nn.Module] = {}
        for number, kind in self.kinds.items():
            if kind not in self.blocks:
                self.blocks[kind] = model.layers[str(number)]
        self.pieces = ModelPieces(model, model.state)
        # What comes before the blocks and behind them is the same in any cut of rows and experts.
        self.ends = self.pieces
        if other is not None and self._cut.context * self._cut.expert > 1:
            self.ends = other(Layout(tensor=self._cut.tensor, sequence=self._cut.sequence)).pieces
        self._counted: dict[object, Group] = {}
        self._held: dict[object, RankParameters] = {}
        self._costs: dict[object, StageCost] = {}

    def flops(self, sequence_length: int) -> TokenFlops:
        """Count the FLOPs of a token of the whole model."""
        return flops_of_token(self.family, self.config, sequence_length)

    def block(self, number: int) -> nn.Module:
        """Return a block like the one of this number, or one of multi-token prediction."""
        return self.blocks[self.kinds[number]] if number in self.kinds else self.model.mtp[str(number)]

    @cached_property
    def _uncut(self) -> SampledModel:
        """Return the same model with all experts on each rank: what holds none is the same there."""
        if self._other is None or self._cut.expert == 1:
            return self
        return self._other(replace(self._cut, expert=1, data_replicate=1))

    def piece(self, number: int, batch: MicroBatch, *, reached: bool) -> Piece:
        """Return the piece of a block; ``reached``: whether a backward comes to what it is given."""
        block = self.block(number)
        if self._uncut is not self and not [*routers(block)]:
            return self._uncut.piece(number, batch, reached=reached)
        return self.pieces.block(block, batch, reached=reached, kind=self.kinds[number])

    def parameters(self, state: ParallelState, split: Sequence[int] | None = None) -> RankParameters:
        """Count the parameters of a rank."""
        stage = self.stage or Stage.of(len(self.kinds), split=split, state=state)
        counts = [Counter(map(self.kinds.__getitem__, part.blocks)) for part in stage.parts]
        parts = tuple(tuple((kind, kinds[kind]) for kind in self.blocks if kinds[kind]) for kinds in counts)
        key = _place(state), parts, stage.first, stage.last
        if key not in self._held:
            self._held[key] = self._of_rank(state, stage, parts)
        return self._held[key]

    def _of_rank(
        self, state: ParallelState, stage: Stage, parts: Sequence[Sequence[tuple[object, int]]]
    ) -> RankParameters:
        model, count = self.model, partial(self._count, state)
        groups = [[(count(self.blocks[kind]), number) for kind, number in part] for part in parts]
        groups[-1] += [(count(block), 1) for block in (model.mtp.values() if stage.last else ())]
        tied, further = model.config.tie_word_embeddings, model.config.mtp_blocks > 0
        apart = (tied or further) and not (stage.first and stage.last)
        first = [*model.entry] if stage.first else []
        last: list[nn.Module] = [model.embed] if stage.last and (tied or further) else []
        last += [model.norm, *([] if tied else [model.head])] if stage.last else []

        def counted(modules: Sequence[nn.Module]) -> Group:
            of_each = (count(module, apart and module is model.embed) for module in dict.fromkeys(modules))
            return sum(of_each, Group())

        of_first, of_last, root = counted(first), counted(last), counted([*first, *last])
        return RankParameters(
            root,
            tuple(map(tuple, groups)),
            (of_first, of_last) if stage.first and stage.last and stage.pieces else (),
            of_last.trained,
            0 if stage.pieces else of_first.trained + of_last.trained - root.trained,
            1 + further,
            lambda number: count(self.block(number)),
        )

    def _count(self, state: ParallelState, module: nn.Module, ends: bool | None = None) -> Group:
        key = module, _place(state), ends
        if key not in self._counted:
            self._counted[key] = count_module(state, module, ends)
        return self._counted[key]

    def costs(self, work: Work, split: Sequence[int] | None = None) -> list[StageCost]:
        """Return the costs of each stage of the rank of ``work``. Stages alike share one object."""
        checkpoint_every, costs = work.checkpoint_every, list[StageCost]()
        stage = self.stage or Stage.of(len(self.kinds), split=split, state=work.state)
        for part in stage.parts:
            kinds = tuple(map(self.kinds.__getitem__, part.blocks))
            place = checkpoint_every, part.blocks[0] % checkpoint_every
            key = kinds, place, part.first, part.last, work.batch, work.loss_chunk, work.loss_sums
            if key not in self._costs:
                self._costs[key] = self._of_stage(work, part)
            costs.append(self._costs[key])
        return costs

    def _of_stage(self, work: Work, stage: Stage) -> StageCost:
        batch, model, ends = work.batch, self.model, self.ends
        # Every later stage sends gradients back, trained or not: torch's stages do.
        reached = not stage.first or _trained(*model.entry)
        blocks, reaches = dict[int, Piece](), set[int]()
        for number in stage.blocks:
            blocks[number] = self.piece(number, batch, reached=reached)
            reached = reached or _trained(self.block(number))
            if reached:
                reaches.add(number)
        entry = ends.entry(batch) if stage.first else None
        uncut = self._uncut
        shared = {uncut.kinds[number]: uncut.block(number) for number in reversed(stage.blocks)}
        before = [uncut.pieces.tables(shared, batch), *([entry] if entry else [])]
        if not stage.last:
            return StageCost(stage.first, blocks, tuple(before), frozenset(reaches), entry)
        end = ends.exit(batch, reached=reached, in_loss=bool(work.loss_chunk))
        reached = reached or _trained(model.norm, model.embed)
        further = {
            int(name): self.pieces.prediction(place, batch, reached=reached)
            for place, name in enumerate(model.mtp)
        }
        loss = ends.loss(batch, chunk=work.loss_chunk, sums=work.loss_sums)
        behind = end, *further.values()
        beside = *before, *behind
        return StageCost(stage.first, blocks, beside, frozenset(reaches), entry, loss, behind, further)


def _place(state: ParallelState) -> tuple[object, ...]:
    """Return all of a layout and of a rank's place in it that the counts of a module's parameters depend on:
    neither the pipeline nor the replicas.
    """
    layout, at = state.layout, state.at
    place = layout.tensor, at.tensor, layout.data_sizes()[1], layout.data_place(at)[1]
    if layout.expert == 1:
        return place
    return *place, layout.expert, layout.data_sizes(experts=True)[1], layout.data_place(at, experts=True)[1:]


def _trained(*modules: nn.Module) -> bool:
    return any(weight.requires_grad for module in modules for weight in module.parameters())


def sampled(family: Family, config: ModelConfig, layout: Layout, asked: Asked = NOTHING) -> SampledModel:
    """Return the sampled model for this layout; see ``one_block_of_each_kind``."""
    model = one_block_of_each_kind(family, config, layout, asked.set_up, frozen=asked.frozen)
    return _sampled(family, model, asked)


@lru_cache(maxsize=64)
def _sampled(family: Family, model: CausalLM, asked: Asked) -> SampledModel:
    return SampledModel(
        family, model, lambda layout: sampled(family, model.config, layout, asked), asked=asked
    )
