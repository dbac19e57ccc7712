"""Plan any rank of any layout from one block of each kind, because most blocks of a model are alike.

A model of 126 equal blocks is built once on the meta device to learn its kinds. After that a layout costs one
block of each kind and the two ends, whatever the number of blocks and ranks; and layouts that cut a block
alike (tensor, context, expert) share even these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from ..layers import Cost, Stage, all_stages
from ..models import AdaptedFamily, CausalLM, Family, ModelConfig
from ..models.base.decoder import Decoder
from ..parallel_state import Layout, ParallelState, declarations
from .rank_parameters import Group, RankParameters, count_parameters
from .stage_costs import StageCost, model_stage_costs
from .step_shape import Work


class SampledModel:
    """Hold one block of each kind of a model, and its ends, for all layouts that cut a block alike.

    The results are those of ``rank_parameters`` and ``stage_costs`` on the built stages. Shared: ``sampled``
    returns the same object for the same arguments.
    """

    def __init__(self, family: Family, config: ModelConfig, cut: Layout, frozen: torch.dtype | None) -> None:
        self.family, self.config = family, config
        self.kinds = block_kinds(family, config)
        shared, state = _with_shared_blocks(family, self.kinds), ParallelState.stand_in(cut)
        if isinstance(shared, AdaptedFamily):
            self._model = shared.build(config, state=state, base_dtype=frozen)
        else:
            self._model = shared.build(config, state=state)
        self._blocks: dict[int, nn.Module] = {}
        for number, kind in enumerate(self.kinds):
            self._blocks.setdefault(kind, self._model.layers[str(number)])
        self._stages: dict[object, Stage] = {}
        self._alike_ranks: dict[object, list[int]] = {}
        self._counted: dict[object, Group] = {}
        self._known: dict[object, Cost] = {}

    def _stage(self, state: ParallelState, split: Sequence[int] | None) -> Stage:
        one, counts = state.layout, split and tuple(split)
        key = one.pipeline, one.virtual_stages, one.v_shape, state.at.pipeline, counts
        if key not in self._stages:
            self._stages[key] = Stage.of(len(self.kinds), split=split, state=state)
        return self._stages[key]

    def alike_ranks(self, layout: Layout, split: Sequence[int] | None, every: int) -> list[int]:
        """Return, for each pipeline rank, the first rank whose stages are like its stages.

        Stages are alike if they have as many blocks of each kind, at the same places among ``every`` blocks,
        and the same ends.
        """
        key = layout.pipeline, layout.virtual_stages, layout.v_shape, split and tuple(split), every
        if key not in self._alike_ranks:
            stages = all_stages(len(self.kinds), layout.stages, split)
            first: dict[object, int] = {}
            found = []
            for rank in range(layout.pipeline):
                parts = [stages[number] for number in layout.stages_of(rank)]
                kinds = [sorted((self.kinds[n], n % every) for n in one.blocks) for one in parts]
                shape = repr([(some, one.first, one.last) for some, one in zip(kinds, parts, strict=True)])
                found.append(first.setdefault(shape, rank))
            self._alike_ranks[key] = found
        return self._alike_ranks[key]

    def parameters(self, state: ParallelState, split: Sequence[int] | None = None) -> RankParameters:
        """Count the parameters of a rank."""
        stage = self._stage(state, split)
        layout = state.layout
        tied, further = self.config.tie_word_embeddings, self.config.mtp_blocks > 0
        ends = (tied or further) and not (stage.first and stage.last)
        flat = _of_one_stage(layout)
        rank = state.rank % flat.world

        def count(module: nn.Module, ends: bool | None = None) -> Group:
            key = id(module), flat, rank, ends
            if key not in self._counted:
                self._counted[key] = _count(module, state, ends=ends)
            return self._counted[key]

        here = [self.kinds[number] for number in stage.blocks]
        of_kind = {kind: count(self._blocks[kind]) for kind in set(here)}
        groups = {f"layers.{number}": of_kind[kind] for number, kind in zip(stage.blocks, here, strict=True)}
        modules = list(self._model.entry) if stage.first else []
        if stage.last:
            modules += [self._model.norm] + ([] if tied else [self._model.head])
            modules += [self._model.embed] if tied or further else []
            groups |= {f"mtp.{name}": count(one) for name, one in self._model.mtp.items()}
        root = [count(one, ends and one is self._model.embed) for one in dict.fromkeys(modules)]
        return RankParameters({"": sum(root, Group()), **groups})

    def costs(self, work: Work, split: Sequence[int] | None = None) -> list[StageCost]:
        """Return the costs of each stage of the rank of ``work``."""
        stage = self._stage(work.state, split)
        rank = copy(self._model)
        rank._modules = {**self._model._modules, "layers": self._layers(stage.blocks)}
        rank.stage = stage
        return model_stage_costs(work, rank, self._known)

    def block(self, number: int) -> nn.Module:
        """Return a block like the one of this number."""
        return self._blocks[self.kinds[number]]

    def _layers(self, numbers: Sequence[int]) -> nn.ModuleDict:
        found = nn.ModuleDict()
        found._modules.update({str(number): self.block(number) for number in numbers})
        return found


@cache
def _of_one_stage(layout: Layout) -> Layout:
    return replace(layout, pipeline=1, virtual_stages=1, v_shape=False)


def _count(module: nn.Module, state: ParallelState, *, ends: bool | None) -> Group:
    named = dict(module.named_parameters())
    return count_parameters(
        ((named[name], one) for name, one in declarations(module).items()), state, ends=ends
    )


def sampled(
    family: Family, config: ModelConfig, layout: Layout, *, frozen: torch.dtype | None = None
) -> SampledModel:
    """Return the sampled model for this layout; raises ``BadInput`` for one that cannot cut the model.

    ``frozen``: the dtype of the weights that adapters leave as they are.
    """
    family.check_layout(config, layout)
    cut = Layout(
        tensor=layout.tensor,
        context=layout.context,
        data_replicate=layout.expert,
        expert=layout.expert,
        sequence=layout.sequence,
        ring=layout.ring,
    )
    return _sampled(family, config, cut, frozen)


@cache
def _sampled(family: Family, config: ModelConfig, cut: Layout, frozen: torch.dtype | None) -> SampledModel:
    return SampledModel(family, config, cut, frozen)


@cache
def block_kinds(family: Family, config: ModelConfig) -> tuple[int, ...]:
    """Return the kind of each block: equal numbers are blocks alike in modules, parameters and settings."""
    known: dict[object, int] = {}
    model = family.on_meta(config)
    return tuple(known.setdefault(_signature(one), len(known)) for one in model.layers.values())


def _signature(block: nn.Module) -> object:
    """Return what tells a block from others: every module's class and settings, every parameter's shape."""
    modules = tuple(
        (path, type(module), tuple(sorted(_settings(vars(module))))) for path, module in block.named_modules()
    )
    parameters = tuple(
        (name, one.shape, one.requires_grad, one.dtype) for name, one in block.named_parameters()
    )
    return modules, parameters


def _settings(attributes: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in attributes.items():
        if isinstance(value, int | float | str | tuple | None):
            yield name, repr(value)


def _with_shared_blocks(family: Family, kinds: Sequence[int]) -> Family:
    """Return the family with a model class that makes one block of each kind and uses it again."""
    if isinstance(family, AdaptedFamily):
        return replace(family, base=_with_shared_blocks(family.base, kinds))
    whole = family.model
    assert issubclass(whole, Decoder), whole

    def block(self: Any, number: int) -> nn.Module:
        if number >= len(kinds):  # a block of multi-token prediction
            return whole.block(self, number)
        made: dict[int, nn.Module] = self.__dict__.setdefault("made", {})
        if kinds[number] not in made:
            made[kinds[number]] = whole.block(self, number)
        return made[kinds[number]]

    model: type[CausalLM] = type(whole.__name__, (whole,), {"block": block})
    return replace(family, model=model)
