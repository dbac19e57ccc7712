"""Add LoRA to stacked experts: for each ``y = x W^T + scale * (x A^T) B^T``, with no collective of its own.

A (E, r, in) and B (E, out, r) lie on the ranks as the stack does along the expert axis. Along the tensor axis
the factor that has the stack's cut dim is cut as the stack is; the other lies whole on every tensor rank, and
each rank's gradient is a part, to be summed:

==============  ==================  ==================
product         A                   B
==============  ==================  ==================
gate, up        whole, partial      rows cut as W's
down            columns cut as W's  whole, partial
==============  ==================  ==================

PEFT's form of this is ``target_parameters``. Source: Hu et al. 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import cast

from torch import Tensor

from ...parallel_state import BadInput, Constant, Cut, Uniform, declarations, declare_parameter, local
from ..lora import lora_scale
from .experts import Experts
from .grouped_matmul import grouped_mm


def attach_expert_lora(
    experts: Experts, outputs: Sequence[str], *, r: int, alpha: float, rslora: bool = False
) -> None:
    """Add one LoRA adapter of rank ``r`` to each expert, in place; it adds zero until B is trained.

    ``outputs``: the products that share one A: ``("gate", "up")``, or one of them, or ``("down",)``. The
    parameters are ``lora_A_<outputs, joined by _>`` (E, r, in) and for each output ``lora_B_<output>``
    (E, out, r). The factors start as those of ``attach_lora``. Raises ``BadInput`` for a rank below 1,
    outputs that do not share an input, or a second adapter at one place.
    """
    if r < 1:
        raise BadInput("lora", "r", expected="at least 1", found=r)
    legal = [*experts.products, *((name,) for names in experts.products if names[1:] for name in names)]
    if tuple(outputs) not in legal:
        expected = " or ".join(", ".join(names) for names in legal)
        raise BadInput("lora", "outputs", expected=expected, found=", ".join(outputs))
    if any(f"lora_B_{output}" in dict(experts.named_parameters()) for output in outputs):
        raise BadInput("lora", "outputs", expected="one adapter at each place", found="a second")
    stacks = declarations(experts)
    inner, outer = (1, 2) if experts.transposed else (2, 1)
    count, width, cut = stacks[outputs[0]].shape[0], stacks[outputs[0]].shape[inner], stacks[outputs[0]].cut
    assert cut is not None
    columns = cut.dim == inner
    a = replace(
        stacks[outputs[0]],
        shape=(count, r, width),
        cut=Cut(2) if columns else None,
        partial=() if columns else ("tensor",),
        initial=Uniform(1 / sqrt(width)),
    )
    adapter = _StackedLowRank(experts, tuple(outputs), lora_scale(r, alpha, rslora=rslora))
    declare_parameter(experts, adapter.a_name, a, experts.state)
    for output in outputs:
        b = replace(
            stacks[output],
            shape=(count, stacks[output].shape[outer], r),
            cut=None if columns else replace(cut, dim=1),
            partial=("tensor",) if columns else (),
            initial=Constant(0.0),
        )
        declare_parameter(experts, f"lora_B_{output}", b, experts.state)
    experts.adapters.append(adapter)


class _StackedLowRank:
    """Compute the products of one stack of A with the B of each output that it serves."""

    def __init__(self, experts: Experts, outputs: tuple[str, ...], scale: float) -> None:
        self.experts, self.outputs, self.scale = experts, outputs, scale
        self.a_name = f"lora_A_{'_'.join(outputs)}"

    def __call__(self, x_MD: Tensor, counts: Sequence[int]) -> dict[str, Tensor]:
        """Return what is added to each output, from the rows that the stack multiplies."""
        h_MR = grouped_mm(x_MD, self._factor(self.a_name), counts) * self.scale
        return {output: grouped_mm(h_MR, self._factor(f"lora_B_{output}"), counts) for output in self.outputs}

    def _factor(self, name: str) -> Tensor:
        return local(cast(Tensor, getattr(self.experts, name)))
