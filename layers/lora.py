"""Add LoRA: ``y = x W^T + scale * (x A^T) B^T``, with no collective of its own.

A (r, in) and B (out, r) follow from how W (out, in) is cut. The factor that has W's cut dim is cut as W is;
the other lies whole on every tensor rank, and each rank's gradient of it is a part, to be summed. Both
factors of a W that is not cut at all are replicated as W is:

==================  ==================  ==================  =========================================
product             A                   B                   where the products lie
==================  ==================  ==================  =========================================
column; gate, up    whole, partial      rows cut as W's     after the collective that brings the input
row; down           columns cut as W's  whole, partial      before the collective that sums the output
replicated          whole, as W         whole, as W         between the blocks
==================  ==================  ==================  =========================================

Key and value heads that W shares among ranks are shared by B alike. For stacked experts (``gate``, ``up``,
``down``) A is (E, r, in) and B (E, out, r), and both lie on the expert axis as the stack does; PEFT's form of
this is ``target_parameters``. Sources: Hu et al. 2021; Kalajdzievski 2023 (rsLoRA's ``alpha / sqrt(r)``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import Declaration, DeclaredModule, declarations, declare_parameter, local, require
from ..parallel_state.initial_weights import Constant, Initial, Uniform
from .activation_checkpointing import products_recomputed
from .dropout import own_random
from .parallel_linear import ParallelLinear, ReplicatedLinear, RowParallelLinear


def linears(model: nn.Module) -> Iterator[tuple[str, ParallelLinear]]:
    """Yield every parallel linear layer of a model with its name."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            yield name, module


def lora_scale(r: int, alpha: float, *, rslora: bool) -> float:
    """Return the factor of the product B A; raise ``BadInput`` for a rank below 1."""
    require(r >= 1, "lora", "r", "at least 1", r)
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
    """Add one LoRA adapter of rank ``r`` to a linear layer, in place; untrained it adds zero.

    ``outputs``: names of a column-parallel linear's products that share one A (default: all of them); each
    has a B of its own. Call it once for each group. A is ``<output>.lora_A``, or ``lora_A`` of the layer if
    it serves several outputs. A starts as PEFT's does (Kaiming-uniform with a = sqrt 5), B starts at zero.
    ``dropout`` is applied to the adapter's input; tensor ranks that share the input share the mask. The
    caller freezes the base. Raises ``BadInput`` for a rank below 1, an unknown output, or a second adapter.
    """
    scale = lora_scale(r, alpha, rslora=rslora)
    names = [*layer.parts]
    adapted = names if outputs is None else outputs
    once = 0 < len(adapted) == len({*adapted}.intersection(names))
    expected = f"some of {', '.join(names)}, each once"
    require(once, "lora", "outputs", expected, ", ".join(adapted) or "nothing")
    parts = [layer.parts[name] for name in adapted]
    bases = [declarations(part)["weight"] for part in parts]
    # Without a cut the factors lie as W does.
    whole = bases[0].partial if isinstance(layer, ReplicatedLinear) else ("tensor",)
    # Each tensor rank has features, or tokens, of its own.
    split = isinstance(layer, RowParallelLinear) or bool(isinstance(layer, ReplicatedLinear) and whole)
    b = {names.index(name): (layer.parts[name], "lora_B") for name in adapted}
    random = partial(own_random, layer.state, split=split)
    add_adapter(
        layer, LowRank(parts[0] if len(parts) == 1 else layer, "lora_A", b, scale, F.linear, dropout, random),
        [factors_of(base, r, whole) for base in bases],
    )  # fmt: skip


def factors_of(
    base: Declaration, r: int, whole: tuple[str, ...], transposed: bool = False
) -> tuple[Declaration, Declaration]:
    """Return A and B of a W that is (..., out, in), or (..., in, out) if ``transposed``.

    ``whole``: the axes over which the gradient of a factor without W's cut dim is partial.
    """
    *stack, first, second = base.shape
    width, features = (first, second) if transposed else (second, first)
    cut, last = base.cut, len(stack) + 1
    of_input = cut is not None and cut.dim == (last - 1 if transposed else last)

    def factor(shape: tuple[int, int], dim: int, cut_as_w: bool, initial: Initial) -> Declaration:
        declaration = replace(base, shape=(*stack, *shape), initial=initial)
        if cut is not None and cut_as_w:
            return replace(declaration, cut=replace(cut, dim=dim), partial=())
        return replace(declaration, cut=None, partial=whole)

    a = factor((r, width), last, of_input, Uniform(1 / sqrt(width)))
    return a, factor((features, r), last - 1, not of_input, Constant(0.0))


@dataclass(frozen=True)
class LowRank:
    """Compute the products of one A with the B of each output that it serves.

    ``a`` holds the parameter ``a_name``; ``b``: for each output the holder and the name of its B. ``product``
    multiplies by a factor: ``F.linear``, or ``grouped_mm`` for stacks. Masks are drawn within ``random``.
    """

    a: DeclaredModule
    a_name: str
    b: Mapping[Any, tuple[DeclaredModule, str]]
    scale: float
    product: Callable[..., Tensor]
    dropout: float = 0.0
    random: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self, x: Tensor, *counts: Sequence[int]) -> dict[Any, Tensor]:
        """Return the term to add to each output.

        ``x``: whole before a column-parallel product, this rank's features before a row-parallel one, the
        rows of each expert, ``counts``, before a stack.
        """
        if self.dropout and self.a.training:
            with self.random():
                x = F.dropout(x, self.dropout)
        h = self.product(x, local(getattr(self.a, self.a_name)), *counts) * self.scale
        # As wide as the output to which it is added, and cheap.
        with nullcontext() if torch.compiler.is_compiling() else products_recomputed():
            return {
                output: self.product(h, part.here(name), *counts) for output, (part, name) in self.b.items()
            }


def add_adapter(layer: Any, adapter: LowRank, factors: Sequence[tuple[Declaration, Declaration]]) -> None:
    """Declare A and each B of an adapter, and let the layer use it; refuse a second one at the same place.

    ``factors``: A and B for each output; the outputs share one A.
    """
    places = [(adapter.a, adapter.a_name), *adapter.b.values()]
    second = any(name in dict(part.named_parameters(recurse=False)) for part, name in places)
    require(not second, "lora", "outputs", "one adapter at each place", "a second")
    declarations = [factors[0][0], *(b for _, b in factors)]
    for (part, name), declaration in zip(places, declarations, strict=True):
        declare_parameter(part, name, declaration, layer.state)
    layer.adapters.append(adapter)
