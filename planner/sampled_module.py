"""Plan any rank of any layout of a model whose code is a user's or transformers': stages are traced whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..layers import PinnedBackend, Scaling, checkpoint_blocks, numbered_blocks, use_float8
from ..models import AdaptedFamily, Family, ModelConfig
from ..parallel_state import Layout, ParallelState
from ..pipeline.relay import StageOutput
from ..recipes.optimizer_sections import ParameterGroup
from ..simulation.model_flops import TokenFlops, flops_of_token
from ..training.optimizer import freeze
from ..training.own.module import OwnConfig, OwnFamily
from ..training.own_parts import OwnParts
from .own_module import bytes_sent, micro_batch_of, module_stages, outputs_of, stages_of
from .rank_parameters import Group, RankParameters, rank_parameters
from .sampled_model import SampledModel, sampled
from .stage_costs import StageCost
from .step_shape import Work

if TYPE_CHECKING:
    from ..models import CausalLM


class Traced(ABC):
    """Answer for a model what ``SampledModel`` does for one of the zoo, whatever its code.

    The model of each pipeline rank is built on the meta device, and each of its stages is one piece.
    """

    #: No stage has blocks that are pieces of their own.
    kinds: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._models: dict[object, nn.Module] = {}
        self._held: dict[object, RankParameters] = {}
        self._outputs: dict[object, list[StageOutput]] = {}
        self._costs: dict[object, list[StageCost]] = {}
        self._numbers: dict[object, int] = {}

    def shapes(
        self, layout: Layout, split: Sequence[int] | None, checkpoint_every: int
    ) -> list[tuple[int, ...]]:
        """Return, for each pipeline rank, a number for each of its stages, of which no two are alike."""
        cut = layout.pipeline, layout.virtual_stages, layout.v_shape, split and tuple(split)
        number = self._numbers.setdefault
        return [
            tuple(number((cut, stage), len(self._numbers)) for stage in layout.stages_of(rank))
            for rank in range(layout.pipeline)
        ]

    def parameters(self, state: ParallelState, split: Sequence[int] | None = None) -> RankParameters:
        """Count the parameters of a rank."""
        key = state.layout, state.rank, split and tuple(split)
        if key not in self._held:
            self._held[key] = rank_parameters(self._model(state, split), state)
        return self._held[key]

    def group(self, number: int, state: ParallelState) -> Group:
        """Count the parameters of a block: nobody asks, as no stage has blocks that are pieces."""
        raise AssertionError(number)

    def block(self, number: int) -> nn.Module:
        """Return a block like that of a number: nobody asks."""
        raise AssertionError(number)

    def costs(self, work: Work, split: Sequence[int] | None = None) -> list[StageCost]:
        """Return the costs of each stage of the rank of ``work``."""
        mode, interval = work.checkpointing, work.checkpoint_every
        key = *self._cut(work.state, split), work.batch, mode, interval
        if key not in self._costs:
            model = self._model(work.state, split)
            if mode != "none":  # in place, so of a model of its own
                model = self._made(work.state, split)
                keeps = work.layout.context == 1
                blocks = numbered_blocks(model).items()
                checkpoint_blocks(blocks, mode, interval=interval, keep_attention=keeps)
            self._costs[key] = self._traced(work, model, split)
        return self._costs[key]

    def _cut(self, state: ParallelState, split: Sequence[int] | None) -> tuple[Any, ...]:
        """Return all of a rank that its model depends on, which is not the data ranks but for experts'."""
        layout, at = state.layout, state.at
        place = layout.data_place(at, experts=True)[2] if layout.expert > 1 else 0
        pipeline = layout.pipeline, layout.virtual_stages, layout.v_shape, split and tuple(split)
        return *layout.block_cut, *pipeline, at.pipeline, at.tensor, at.context, place

    def _model(self, state: ParallelState, split: Sequence[int] | None) -> nn.Module:
        key = self._cut(state, split)
        if key not in self._models:
            self._models[key] = self._made(state, split)
        return self._models[key]

    def informed(self, work: Work, split: Sequence[int] | None) -> Work:
        """Return the step as it is: between all stages go hidden states."""
        return work

    @abstractmethod
    def flops(self, sequence_length: int) -> TokenFlops:
        """Count the FLOPs of a token of the whole model."""

    @abstractmethod
    def _made(self, state: ParallelState, split: Sequence[int] | None) -> nn.Module:
        """Make the stages of a rank, set up as the recipe says."""

    @abstractmethod
    def _traced(self, work: Work, model: nn.Module, split: Sequence[int] | None) -> list[StageCost]:
        """Trace the stages of a rank."""


class SampledModule(Traced):
    """Plan a user's module."""

    def __init__(self, family: OwnFamily, config: OwnConfig) -> None:
        super().__init__()
        assert isinstance(family.parts, OwnParts)
        self.family, self.config, self.own = family, config, family.parts

    def informed(self, work: Work, split: Sequence[int] | None) -> Work:
        """Return the step with what each stage gives, and whether it trains all parameters."""
        sent = bytes_sent(self.outputs(work, split)) if work.layout.pipeline > 1 else ()
        trains_all = getattr(self.family.on_meta(self.config), "trains_all", False)
        return replace(work, sent=sent, trains_all=trains_all)

    def flops(self, sequence_length: int) -> TokenFlops:
        """Count the FLOPs of a token of the whole module; attention counts with all else that is no product
        with weights.
        """
        work = Work(ParallelState.alone(), 1, sequence_length, 1, 1, fused=False)
        model = self._made(work.state, None)
        (stage,) = module_stages(work, model, self.own.samples, self.own.loss)
        (piece,) = stage.beside.parts
        figures = piece.matrices, piece.other, piece.trained
        return TokenFlops(*(figure / sequence_length for figure in figures))

    def _traced(self, work: Work, model: nn.Module, split: Sequence[int] | None) -> list[StageCost]:
        outputs = self.outputs(work, split)
        return module_stages(work, model, self.own.samples, self.own.loss, outputs)

    def _made(self, state: ParallelState, split: Sequence[int] | None) -> nn.Module:
        model: nn.Module = self.family.build(self.config, split=self._stated(split), state=state)
        self.own.set_up(model, state)
        return model

    def _stated(self, split: Sequence[int] | None) -> Sequence[int] | None:
        """Return the split for a class that takes one; others cut themselves, as the split says."""
        return split if self.family.takes_split else None

    def outputs(self, work: Work, split: Sequence[int] | None) -> list[StageOutput]:
        """Return what each stage gives for one micro-batch."""
        layout = work.layout
        key = *self._cut(ParallelState.stand_in(layout), split), work.micro_batch, work.compute
        if key not in self._outputs:
            here = replace(work, state=ParallelState.stand_in(layout))
            part = micro_batch_of(here, self.own.samples, getattr(self.own.loss, "sequence", {}))
            self._outputs[key] = outputs_of(lambda state: self._model(state, split), here, part)
        return self._outputs[key]


@dataclass(frozen=True)
class Asked:
    """State what a recipe asks of a model: the groups of its parameters, how linears multiply in float8, who
    computes attention, and in which dtype weights are that adapters leave as they are.
    """

    groups: tuple[tuple[str, ParameterGroup], ...] = ()
    float8: Scaling | None = None
    backend: PinnedBackend = "auto"
    frozen: torch.dtype | None = None


class SampledAdopted(Traced):
    """Plan a model whose blocks transformers' code computes."""

    def __init__(self, family: Family, config: ModelConfig, asked: Asked) -> None:
        super().__init__()
        self.family, self.config, self.asked = family, config, asked

    def flops(self, sequence_length: int) -> TokenFlops:
        """Count the FLOPs of a token of the whole model, by the sizes of its weights."""
        return flops_of_token(self.family, self.config, sequence_length)

    def _traced(self, work: Work, model: nn.Module, split: Sequence[int] | None) -> list[StageCost]:
        return stages_of(work, model)

    def _made(self, state: ParallelState, split: Sequence[int] | None) -> CausalLM:
        family, asked = self.family, self.asked
        frozen: dict[str, Any] = {"base_dtype": asked.frozen} if isinstance(family, AdaptedFamily) else {}
        model = family.build(self.config, split=split, state=state, **frozen)
        freeze(model, dict(asked.groups))
        model.pin_attention(asked.backend)
        if asked.float8 is not None:
            use_float8(model, asked.float8)
        return model


#: One for each cut of the layers, of which a search asks for many.
_adopted = lru_cache(maxsize=64)(lambda family, config, asked, cut: SampledAdopted(family, config, asked))


def planned_model(
    family: Family,
    config: ModelConfig,
    layout: Layout,
    asked: Asked = Asked(),
) -> SampledModel | Traced:
    """Return what plans a model: one block of each kind of the zoo's (``sampled``), which takes no groups and
    no backend, or a trace of all that a rank holds of another.
    """
    if isinstance(family, OwnFamily):
        assert isinstance(config, OwnConfig)
        return sampled_module(family, config, layout)
    if family.adopted:
        family.check_layout(config, layout)
        return _adopted(family, config, asked, layout.block_cut)
    return sampled(family, config, layout, frozen=asked.frozen, float8=asked.float8)


def sampled_module(family: OwnFamily, config: OwnConfig, layout: Layout) -> SampledModule:
    """Return the module's plan for layouts that cut its layers alike; the same object for the same cut."""
    assert isinstance(family.parts, OwnParts)
    key, known = layout.block_cut, family.parts.known
    if key not in known:
        known[key] = SampledModule(family, config)
    made: SampledModule = known[key]
    return made
