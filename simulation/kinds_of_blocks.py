"""Tell blocks of different kinds apart, and build a model with one block of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..models import AdaptedFamily, Family, ModelConfig
from ..parallel_state import Layout, ParallelState

if TYPE_CHECKING:
    from ..models import CausalLM

#: Changes a model in place; equal ones change it alike.
SetUp = Callable[["CausalLM"], object]


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
def block_kinds(family: Family, config: ModelConfig, set_up: SetUp | None = None) -> tuple[int, ...]:
    """Return the kind of each block: equal numbers are blocks alike in modules, parameters and settings.

    ``set_up``: changes a model as a recipe says, by the names of its parameters.
    """
    numbers: dict[object, int] = {}
    if set_up is None:
        model = family.on_meta(config)
    else:
        set_up(model := family.build(config))
    return tuple(numbers.setdefault(signature(block), len(numbers)) for block in model.layers.values())


def one_block_of_each_kind(
    family: Family,
    config: ModelConfig,
    layout: Layout,
    set_up: SetUp | None = None,
    *,
    frozen: torch.dtype | None = None,
) -> CausalLM:
    """Return a model on the meta device, cut as a layout says, in which blocks alike are one block.

    Shared: of layouts that cut a block alike it is the same object. ``set_up``: see ``block_kinds``.
    ``frozen``: the dtype of the weights that adapters leave as they are. Raises ``BadInput`` for a layout
    that cannot cut the model.
    """
    family.check_layout(config, layout)
    cut = Layout.of_block_cut(layout.block_cut)
    return _built(family, config, cut, set_up, frozen if isinstance(family, AdaptedFamily) else None)


def build_one_of_each_kind(
    family: Family,
    config: ModelConfig,
    cut: Layout,
    set_up: SetUp | None = None,
    frozen: torch.dtype | None = None,
) -> CausalLM:
    """Build such a model for one rank of ``cut``."""
    shared = _with_shared_blocks(family, block_kinds(family, config, set_up))
    dtypes: dict[str, Any] = {"base_dtype": frozen} if isinstance(shared, AdaptedFamily) else {}
    model = shared.build(config, state=ParallelState.stand_in(cut), **dtypes)
    if set_up is not None:
        set_up(model)
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
        block_of_kind: dict[int, nn.Module] = self.__dict__.setdefault("made", {})
        if kinds[number] not in block_of_kind:
            block_of_kind[kinds[number]] = whole.block(self, number)
        return block_of_kind[kinds[number]]

    model: type[CausalLM] = type(whole.__name__, (whole,), {"block": block})
    return replace(family, model=model)
