"""Compute experts, and those of GPT-OSS: many feed-forward nets of one shape, their weights in stacks."""

from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import cast

import torch
from torch import Tensor, nn

from ...parallel_state import Cut, DeclaredModule, Layout, ParallelState, declarations, local, require
from ...parallel_state.initial_weights import Initial, Uniform
from ..lora import LowRank, add_adapter, factors_of, lora_scale
from ..mlp import activation
from .grouped_matmul import GroupSizes, grouped_mm, has_kernel


class Experts(DeclaredModule):
    """Compute ``down_e(act(gate_e(x)) * up_e(x))`` for the rows of each expert e.

    The parameters are ``gate``, ``up`` (E, F, D) and ``down`` (E, D, F), without biases. A rank holds the
    experts of its place on the ``expert`` axis, and of each the part of its tensor rank. Input: (M, D),
    sorted by expert, with ``counts`` rows for each expert on this rank. Output: (M, D), partial over the
    tensor ranks. Raises ``BadInput`` if the layout does not cut it evenly.
    """

    #: The numbers of rows change at every step: nothing for ``torch.compile``.
    one_graph = False

    #: Selective checkpointing keeps none of its products, as few or as many as their rows may be.
    recomputed = True

    #: Whether the stacks are (E, in, out).
    transposed = False
    #: The names of the stacks, in groups that multiply the same rows.
    products: tuple[tuple[str, ...], ...] = ("gate", "up"), ("down",)
    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        act: str = "silu",
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(state)
        self.act = activation(act)
        self.adapters: list[LowRank] = []
        shape, start = (num_experts, intermediate_size, hidden_size), Uniform(1 / sqrt(hidden_size))
        for name in self.products[0]:
            self.declare(name, shape, Cut(1), experts=True, initial=initial or start)
        shape, start = (num_experts, hidden_size, intermediate_size), Uniform(1 / sqrt(intermediate_size))
        self.declare("down", shape, Cut(2), experts=True, initial=initial or start)

    def forward(self, x_MD: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the experts' outputs (M, D), partial over the tensor ranks."""
        hidden = self._products(("up", "gate"), x_MD, counts)
        return self._products(("down",), self.act(hidden["gate"]) * hidden["up"], counts)["down"]

    def _products(self, names: tuple[str, ...], x: Tensor, counts: Sequence[int]) -> dict[str, Tensor]:
        stacks = {name: local(cast(Tensor, getattr(self, name))) for name in names}
        outputs = {
            name: grouped_mm(x, stack.transpose(1, 2) if self.transposed else stack, counts)
            for name, stack in stacks.items()
        }
        for adapter in self.adapters:
            if not adapter.b.keys().isdisjoint(names):
                for name, change in adapter(x, counts).items():
                    outputs[name] = outputs[name] + change
        return outputs

    def extra_repr(self) -> str:
        return f"here={tuple(local(self.up).shape)}"


class ClampedExperts(Experts):
    """Compute ``down_e((up + 1) * gate * sigmoid(alpha * gate))`` for the rows of each expert e.

    ``gate`` is at most ``limit``, ``up`` between ``-limit`` and ``limit``. Both come from one product, whose
    even columns are the gate. The parameters lie as Hugging Face's do: ``gate_up`` (E, D, 2F), ``down``
    (E, F, D), ``gate_up_bias`` (E, 2F) and ``down_bias`` (E, D), which one tensor rank adds. Input, output
    and what a rank holds are those of ``Experts``. Source: GPT-OSS's model card (2025), section 2.3.
    """

    transposed = True
    products = ("gate_up",), ("down",)
    gate_up: nn.Parameter
    gate_up_bias: nn.Parameter
    down_bias: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        alpha: float = 1.702,
        limit: float = 7.0,
        initial: Initial,
        state: ParallelState | None = None,
    ) -> None:
        DeclaredModule.__init__(self, state)
        self.adapters: list[LowRank] = []
        self.alpha, self.limit = alpha, limit
        wide, declare = 2 * intermediate_size, partial(self.declare, experts=True)
        # A gate and its upper product are neighbours and stay on one rank.
        declare("gate_up", (num_experts, hidden_size, wide), Cut(2, unit=2), initial=initial)
        declare("gate_up_bias", (num_experts, wide), Cut(1, unit=2))
        declare("down", (num_experts, intermediate_size, hidden_size), Cut(1), initial=initial)
        declare("down_bias", (num_experts, hidden_size), partial=("tensor",))

    def forward(self, x_MD: Tensor, counts: Sequence[int]) -> Tensor:
        both_MF = self._products(("gate_up",), x_MD, counts)["gate_up"]
        both_MF = both_MF + _rows(local(self.gate_up_bias), counts, both_MF)
        gate_MF = both_MF[:, ::2].clamp(max=self.limit)
        up_MF = both_MF[:, 1::2].clamp(-self.limit, self.limit)
        made_MF = (up_MF + 1) * (gate_MF * torch.sigmoid(self.alpha * gate_MF))
        out_MD = self._products(("down",), made_MF, counts)["down"]
        return out_MD + _rows(local(self.down_bias), counts, out_MD) * float(self.state.tensor.index == 0)

    def extra_repr(self) -> str:
        return f"here={tuple(local(self.gate_up).shape)}, alpha={self.alpha}, limit={self.limit}"


def attach_expert_lora(
    experts: Experts, outputs: Sequence[str], *, r: int, alpha: float, rslora: bool = False
) -> None:
    """Add one LoRA adapter of rank ``r`` to each expert, in place; it adds zero until B is trained.

    ``outputs``: the products that share one A: ``("gate", "up")``, or one of them, or ``("down",)``. The
    parameters are ``lora_A_<outputs, joined by _>`` (E, r, in) and for each output ``lora_B_<output>``
    (E, out, r). The factors start as those of ``attach_lora``, and ``layers/lora.py`` says how they are cut.
    Raises ``BadInput`` for a rank below 1, outputs of different inputs, or a second adapter at a place.
    """
    scale = lora_scale(r, alpha, rslora=rslora)
    legal = [*experts.products, *((name,) for names in experts.products if names[1:] for name in names)]
    expected = " or ".join(", ".join(names) for names in legal)
    require(tuple(outputs) in legal, "lora", "outputs", expected, ", ".join(outputs))
    stacks, b = declarations(experts), {output: (experts, f"lora_B_{output}") for output in outputs}
    adapter = LowRank(experts, f"lora_A_{'_'.join(outputs)}", b, scale, grouped_mm)
    factors = [factors_of(stacks[output], r, ("tensor",), experts.transposed) for output in outputs]
    add_adapter(experts, adapter, factors)


def stacks_of_experts(model: nn.Module, layout: Layout) -> list[nn.Module]:
    """Return the modules whose stacks of experts FSDP gathers by themselves: all, if ranks share them out."""
    return [
        module
        for module in model.modules()
        if layout.expert > 1
        and any(declaration.experts for declaration in module.__dict__.get("declared", {}).values())
    ]


def _rows(bias_EF: Tensor, counts: Sequence[int], made_MF: Tensor) -> Tensor:
    """Return the bias of each row of a product, (M, F)."""
    if isinstance(counts, GroupSizes) and has_kernel(made_MF, bias_EF):  # without waiting for the numbers
        sizes_E = counts.ends_E.diff(prepend=counts.ends_E.new_zeros(1))
        return bias_EF.repeat_interleave(sizes_E, 0, output_size=len(made_MF))
    return torch.cat([bias.expand(count, -1) for bias, count in zip(bias_EF.unbind(), counts, strict=True)])
