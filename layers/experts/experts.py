"""Compute experts: many feed-forward nets of one shape, with their weights in stacks."""

from collections.abc import Sequence
from math import sqrt
from typing import Protocol, cast

from torch import Tensor, nn

from ...parallel_state import (
    Cut,
    Declaration,
    DeclaredModule,
    Initial,
    ParallelState,
    Uniform,
    alone_or,
    declare_parameter,
    local,
)
from ..mlp import activation
from .grouped_matmul import grouped_mm


class ExpertAdapter(Protocol):
    """Change some of the experts' products (LoRA)."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the stacks whose products it changes."""

    def __call__(self, x_MD: Tensor, counts: Sequence[int], /) -> dict[str, Tensor]:
        """Return what is added to each of ``outputs``, from the rows that their stacks multiply."""


class Experts(DeclaredModule):
    """Compute ``down_e(act(gate_e(x)) * up_e(x))`` for the rows of each expert e, or
    ``down_e(act(up_e(x)))``.

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
        gated: bool = True,
        initial: Initial | None = None,
        out_initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        self.act, self.gated = activation(act), gated
        self.adapters: list[ExpertAdapter] = []
        self.state = state = alone_or(state)
        wide, narrow = (
            (num_experts, intermediate_size, hidden_size),
            (num_experts, hidden_size, intermediate_size),
        )
        for name in ("gate", "up") if gated else ("up",):
            start = initial or Uniform(1 / sqrt(hidden_size))
            declare_parameter(self, name, Declaration(wide, Cut(1), experts=True, initial=start), state)
        start = out_initial or initial or Uniform(1 / sqrt(intermediate_size))
        declare_parameter(self, "down", Declaration(narrow, Cut(2), experts=True, initial=start), state)

    @property
    def products(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the stacks, in groups that multiply the same rows."""
        return (("gate", "up") if self.gated else ("up",)), ("down",)

    def forward(self, x_MD: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the experts' outputs (M, D), partial over the tensor ranks."""
        made = self._products(("up", "gate") if self.gated else ("up",), x_MD, counts)
        y_MF = self.act(made["gate"]) * made["up"] if self.gated else self.act(made["up"])
        return self._products(("down",), y_MF, counts)["down"]

    def _products(self, names: tuple[str, ...], x: Tensor, counts: Sequence[int]) -> dict[str, Tensor]:
        stacks = {name: local(cast(Tensor, getattr(self, name))) for name in names}
        made = {
            name: grouped_mm(x, stack.transpose(1, 2) if self.transposed else stack, counts)
            for name, stack in stacks.items()
        }
        for adapter in self.adapters:
            if adapter.outputs[0] in names:
                for name, change in adapter(x, counts).items():
                    made[name] = made[name] + change
        return made

    def extra_repr(self) -> str:
        return f"here={tuple(local(self.up).shape)}"
