"""Plan any rank of any layout of a model: the zoo's, or one whose code is a user's or transformers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..layers import checkpoint_blocks, numbered_blocks
from ..models import AdaptedFamily, Family, ModelConfig
from ..parallel_state import Layout, ParallelState
from ..pipeline.relay import StageOutput
from ..simulation.model_flops import TokenFlops, flops_of_token
from ..training.own_module import OwnFamily
from ..training.precision import multiply_in_float8
from .own_module import Loss, bytes_sent, micro_batch_of, outputs_of, stages_of
from .rank_parameters import RankParameters, module_parameters
from .sampled_model import NOTHING, Asked, SampledModel, sampled
from .stage_costs import StageCost
from .step_shape import Work

if TYPE_CHECKING:
    from ..models import CausalLM


class TracedModel:
    """Trace each stage of a model whole; ``make`` builds the stages of a rank on the meta device, set up as a
    recipe says.
    """

    def __init__(
        self,
        family: Family,
        config: ModelConfig,
        make: Callable[[ParallelState, Sequence[int] | None], nn.Module],
    ) -> None:
        self.family, self.config, self._make = family, config, make
        self._own = family if isinstance(family, OwnFamily) else None
        self._models: dict[object, nn.Module] = {}
        self._costs: dict[object, list[StageCost]] = {}
        self._outputs: dict[object, list[StageOutput]] = {}

    def parameters(self, state: ParallelState, split: Sequence[int] | None = None) -> RankParameters:
        """Count the parameters of a rank."""
        return module_parameters(self._model(state, split), state)

    def costs(self, work: Work, split: Sequence[int] | None = None) -> list[StageCost]:
        """Return the costs of each stage of the rank of ``work``."""
        mode, interval, own = work.checkpointing, work.checkpoint_every, self._own
        key = *self._cut(work.state, split), work.batch, mode, interval
        if key not in self._costs:
            model = self._model(work.state, split)
            if mode != "none":  # in place, so of a model of its own
                model, keeps = self._make(work.state, split), work.layout.context == 1
                blocks = numbered_blocks(model).items()
                checkpoint_blocks(blocks, mode, interval=interval, keep_attention=keeps)
            of_own = (own.samples, own.loss, self.outputs(work, split)) if own else ()
            self._costs[key] = stages_of(work, model, *of_own)
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
            self._models[key] = self._make(state, split)
        return self._models[key]

    def outputs(self, work: Work, split: Sequence[int] | None) -> list[StageOutput]:
        """Return what each stage of a user's module gives for one micro-batch."""
        assert self._own is not None
        first = replace(work, state=ParallelState.stand_in(work.layout))
        key = *self._cut(first.state, split), work.micro_batch, work.compute
        if key not in self._outputs:
            part = micro_batch_of(first, self._own.samples, getattr(self._own.loss, "sequence", {}))
            self._outputs[key] = outputs_of(lambda state: self._model(state, split), first, part)
        return self._outputs[key]

    def flops(self, sequence_length: int) -> TokenFlops:
        """Count the FLOPs of a token of the whole model: of a user's module those of a trace, in which
        attention counts with all else that is no product with weights.
        """
        if self._own is None:
            return flops_of_token(self.family, self.config, sequence_length)
        work = Work(ParallelState.alone(), 1, sequence_length, 1, 1, fused=False)
        (stage,) = stages_of(work, self._make(work.state, None), self._own.samples, self._own.loss)
        (piece,) = stage.beside
        matrices, trained, other = (flops / sequence_length for flops in piece.plain.forward_flops)
        return TokenFlops(matrices, other, trained)


PlannedModel = SampledModel | TracedModel


def planned_rank(
    work: Work, model: nn.Module, samples: Mapping[str, Tensor] | None = None, loss: Loss | None = None
) -> tuple[RankParameters, list[StageCost]]:
    """Return the parameters and the costs of the stages of a rank that holds ``model``; see ``stages_of``."""
    if (whole := _whole(model)) is not None:
        return whole.parameters(work.state), whole.costs(work)
    return module_parameters(model, work.state), stages_of(work, model, samples, loss)


def rank_parameters(model: nn.Module, state: ParallelState) -> RankParameters:
    """Count the parameters of a rank's stages, which may be on the meta device. Buffers count beside them."""
    whole = _whole(model)
    return module_parameters(model, state) if whole is None else whole.parameters(state)


def _whole(model: Any) -> SampledModel | None:
    """Return what plans a rank's model of the zoo, whose blocks and ends are pieces, as it says."""
    if getattr(model, "in_pieces", False) is not True:
        return None
    return SampledModel(model.family, model, stage=model.stage)


def of_own_module(work: Work, model: PlannedModel, split: Sequence[int] | None) -> Work:
    """Return the step with what each stage of a user's module gives, and whether it trains all parameters."""
    if not isinstance(model.family, OwnFamily) or isinstance(model, SampledModel):
        return work
    sent = bytes_sent(model.outputs(work, split)) if work.layout.pipeline > 1 else ()
    trains_all = getattr(model.family.on_meta(model.config), "trains_all", False)
    return replace(work, sent=sent, trains_all=trains_all)


def planned_model(
    family: Family, config: ModelConfig, layout: Layout, asked: Asked = NOTHING
) -> PlannedModel:
    """Return what plans a model, the same object for layouts that cut its layers alike: one block of each
    kind of the zoo's, or a trace of all that a rank holds of another.
    """
    if isinstance(family, OwnFamily):
        return own_model(family, config, layout)
    if family.adopted:
        family.check_layout(config, layout)
        return _adopted(family, config, asked, layout.block_cut)
    return sampled(family, config, layout, asked)


def own_model(family: OwnFamily, config: ModelConfig, layout: Layout) -> TracedModel:
    """Return what plans a user's module."""

    def make(state: ParallelState, split: Sequence[int] | None) -> nn.Module:
        # Classes that take no split cut themselves, as the split says.
        model: nn.Module = family.build(config, split=split if family.takes_split else None, state=state)
        family.set_up(model)
        multiply_in_float8(model, family.recipe.scaling, state)
        return model

    traced: TracedModel = family.known.setdefault(layout.block_cut, TracedModel(family, config, make))
    return traced


@lru_cache(maxsize=64)  # one for each cut of the layers, of which a search asks for many
def _adopted(family: Family, config: ModelConfig, asked: Asked, cut: object) -> TracedModel:

    def make(state: ParallelState, split: Sequence[int] | None) -> nn.Module:
        frozen: dict[str, Any] = {"base_dtype": asked.frozen} if isinstance(family, AdaptedFamily) else {}
        model: CausalLM = family.build(config, split=split, state=state, **frozen)
        asked(model)
        return model

    return TracedModel(family, config, make)
