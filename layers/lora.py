"""Add LoRA to a parallel linear: ``y = x W^T + scale * (x A^T) B^T`` with no collective of its own.

A (r, in) and B (out, r) follow from how W (out, in) is cut. The factor that has W's cut dim is cut as W is;
the other lies whole on every tensor rank, and each rank's gradient of it is a part, to be summed. Both
factors of a W that is not cut at all are replicated as W is:

=============  ==================  ==================  ==============================================
linear         A                   B                   where the products lie
=============  ==================  ==================  ==============================================
column         whole, partial      rows cut as W's     after the collective that brings the input
row            columns cut as W's  whole, partial      before the collective that sums the output
replicated     whole, as W         whole, as W         between the blocks
=============  ==================  ==================  ==============================================

Key and value heads that W shares among ranks are shared by B alike. Source: Hu et al. 2021; rsLoRA's scale
``alpha / sqrt(r)`` is Kalajdzievski's, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import sqrt
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import (
    BadInput,
    Constant,
    Declaration,
    ParallelState,
    Uniform,
    declarations,
    declare_parameter,
    local,
)
from .activation_checkpointing import products_recomputed
from .column_parallel_linear import ColumnParallelLinear
from .dropout import own_random
from .linear_extensions import OutputPart
from .replicated_linear import ReplicatedLinear
from .row_parallel_linear import RowParallelLinear

#: The layers that take an adapter.
ParallelLinear = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear


def linears(model: nn.Module) -> Iterator[tuple[str, ParallelLinear]]:
    """Yield every parallel linear layer of a model with its name."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            yield name, module


def lora_scale(r: int, alpha: float, *, rslora: bool) -> float:
    """Return the factor of the product B A."""
    return alpha / (sqrt(r) if rslora else r)


def attach_lora(
    layer: ParallelLinear,
    *,
    r: int,
    alpha: float,
    dropout: float = 0.0,
    rslora: bool = False,
    outputs: Sequence[str] | None = None,
) -> None:
    """Add one LoRA adapter of rank ``r`` to a linear layer, in place; it adds zero until ``lora_B`` is
    trained.

    ``outputs``: names of a column-parallel linear's products that share one A (default: all of them); each
    has a B of its own. Call it once for each group. A is ``<output>.lora_A``, or ``lora_A`` of the layer if
    it serves several outputs. A starts as PEFT's does (Kaiming-uniform with a = sqrt 5), B starts at zero.
    ``dropout`` is applied to the adapter's input; tensor ranks that share the input share the mask. The
    caller freezes the base. Raises ``BadInput`` for a rank below 1, an unknown output, or a second adapter at
    one place.
    """
    if r < 1:
        raise BadInput("lora", "r", expected="at least 1", found=r)
    parts = {number: layer.parts[number] for number in _numbers(layer, outputs)}
    outer = [part.holder for part in parts.values()]
    inner = outer[0] if len(outer) == 1 else layer
    if "lora_A" in dict(inner.named_parameters(recurse=False)):
        raise BadInput("lora", "outputs", expected="one adapter at each place", found="a second")
    bases = [declarations(module)["weight"] for module in outer]
    first = bases[0]
    whole = first.partial if isinstance(layer, ReplicatedLinear) else ("tensor",)
    cut = first.cut if first.cut is not None and first.cut.dim == 1 else None
    bound = Uniform(1 / sqrt(layer.in_features))
    a = Declaration((r, first.shape[1]), cut, partial=() if cut else whole, initial=bound)
    declare_parameter(inner, "lora_A", a, layer.state)
    for module, base in zip(outer, bases, strict=True):
        cut = base.cut if base.cut is not None and base.cut.dim == 0 else None
        b = replace(a, shape=(base.shape[0], r), cut=cut, partial=() if cut else whole)
        declare_parameter(module, "lora_B", replace(b, initial=Constant(0.0)), layer.state)
    # Each tensor rank has features, or tokens, of its own.
    split = isinstance(layer, RowParallelLinear) or bool(isinstance(layer, ReplicatedLinear) and whole)
    scale = lora_scale(r, alpha, rslora=rslora)
    layer.adapters.append(_LowRank(inner, parts, scale, dropout, split, layer.state))


class _LowRank:
    """Compute the products of one A with the B of each output that it serves."""

    def __init__(
        self,
        inner: nn.Module,
        parts: Mapping[int, OutputPart],
        scale: float,
        dropout: float,
        split: bool,
        state: ParallelState,
    ) -> None:
        self.inner, self.parts, self.scale = inner, parts, scale
        self.dropout, self.split, self.state = dropout, split, state

    def __call__(self, x: Tensor) -> list[tuple[int, Tensor]]:
        """Return the terms to add to the outputs, each with the output's number.

        ``x`` is whole before a column-parallel product, and this rank's features before a row-parallel one.
        """
        if self.dropout and self.inner.training:
            with own_random(self.state, split=self.split):
                x = F.dropout(x, self.dropout)
        h = F.linear(x, local(cast(Tensor, self.inner.lora_A))) * self.scale
        # As wide as the output to which it is added, and cheap.
        with nullcontext() if torch.compiler.is_compiling() else products_recomputed():
            return [(number, F.linear(h, part.weight("lora_B"))) for number, part in self.parts.items()]


def _numbers(layer: ParallelLinear, outputs: Sequence[str] | None) -> Sequence[int]:
    """Return the numbers of the layer's outputs that the adapter changes."""
    names = list(layer.out_features) if not isinstance(layer.out_features, int) else [""]
    if outputs is None:
        return range(len(names))
    for name in outputs:
        if name not in names:
            raise BadInput("lora", "outputs", expected=f"one of {', '.join(names)}", found=repr(name))
    return [names.index(name) for name in outputs]
