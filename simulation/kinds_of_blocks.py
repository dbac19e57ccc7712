"""Tell blocks of different kinds apart, and build a model with one block of each kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..layers import Scaling, use_float8
from ..models import AdaptedFamily, Family, ModelConfig
from ..parallel_state import Layout, ParallelState

if TYPE_CHECKING:
    from ..models import CausalLM


def signature(block: nn.Module) -> object:
    """Return what tells a block from others: every module's class and settings, every parameter's shape."""
    modules = tuple(
        (path, type(module), tuple(sorted(_settings(vars(module))))) for path, module in block.named_modules()
    )
    parameters = tuple(
        (name, parameter.shape, parameter.requires_grad, parameter.dtype)
        for name, parameter in block.named_parameters()
    )
    return modules, parameters


def _settings(attributes: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in attributes.items():
        if (
            isinstance(value, int | float | str | tuple | None) and name != "layer_idx"
        ):  # transformers' number
            yield name, repr(value)


@lru_cache(maxsize=64)
def block_kinds(family: Family, config: ModelConfig) -> tuple[int, ...]:
    """Return the kind of each block: equal numbers are blocks alike in modules, parameters and settings."""
    known: dict[object, int] = {}
    model = family.on_meta(config)
    return tuple(known.setdefault(signature(block), len(known)) for block in model.layers.values())


def one_block_of_each_kind(
    family: Family,
    config: ModelConfig,
    layout: Layout,
    *,
    frozen: torch.dtype | None = None,
    float8: Scaling | None = None,
) -> CausalLM:
    """Return a model on the meta device, cut as a layout says, in which blocks alike are one block.

    Shared: of layouts that cut a block alike it is the same object. ``frozen``: the dtype of the weights that
    adapters leave as they are. ``float8``: the scaling of linears that multiply in float8. Raises
    ``BadInput`` for a layout that cannot cut the model.
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
    return _built(family, config, cut, frozen if isinstance(family, AdaptedFamily) else None, float8)


def build_one_of_each_kind(
    family: Family,
    config: ModelConfig,
    cut: Layout,
    frozen: torch.dtype | None = None,
    float8: Scaling | None = None,
) -> CausalLM:
    """Build such a model for one rank of ``cut``."""
    shared, state = _with_shared_blocks(family, block_kinds(family, config)), ParallelState.stand_in(cut)
    if isinstance(shared, AdaptedFamily):
        model = shared.build(config, state=state, base_dtype=frozen)
    else:
        model = shared.build(config, state=state)
    if float8 is not None:
        use_float8(model, float8)
    return model


_built = lru_cache(maxsize=64)(build_one_of_each_kind)


def _with_shared_blocks(family: Family, kinds: Sequence[int]) -> Family:
    """Return the family with a model class that makes one block of each kind and uses it again."""
    if isinstance(family, AdaptedFamily):
        return replace(family, base=_with_shared_blocks(family.base, kinds))
    if family.adopted:  # whose code makes all blocks at once
        return family
    whole = family.model

    def block(self: Any, number: int) -> nn.Module:
        if number >= len(kinds):  # a block of multi-token prediction
            return whole.block(self, number)
        made: dict[int, nn.Module] = self.__dict__.setdefault("made", {})
        if kinds[number] not in made:
            made[kinds[number]] = whole.block(self, number)
        return made[kinds[number]]

    model: type[CausalLM] = type(whole.__name__, (whole,), {"block": block})
    return replace(family, model=model)
