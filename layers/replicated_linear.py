"""Define a linear layer that every tensor rank holds whole, for the tokens between the blocks."""

from __future__ import annotations

from math import sqrt

from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import (
    Declaration,
    DeclaredModule,
    Initial,
    ParallelState,
    Uniform,
    alone_or,
    declare_parameter,
)
from .argument_checks import check_no_state, check_width
from .linear_extensions import Adapter, OutputPart, initial_of_bias


class ReplicatedLinear(DeclaredModule):
    """Compute ``y = x W^T + b`` on every tensor rank, without any collective; ``W`` is not cut.

    Input: (B, S, in), or (B, S / tensor, in) with sequence parallelism. Output: (B, S, out), or (B, S /
    tensor, out). Under sequence parallelism each rank computes its own tokens, so that its gradients are
    partial. For products that are narrower than the hidden states, such as DeepSeek's latents.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        check_no_state(bias, "ReplicatedLinear", "bias")
        self.state = alone_or(state)
        self.in_features, self.out_features = in_features, out_features
        self.adapters: list[Adapter] = []
        self.parts = [OutputPart(self, None, out_features)]
        initial = initial or Uniform(1 / sqrt(in_features))
        partial = ("tensor",) if self.state.sequence else ()
        weight = Declaration((out_features, in_features), partial=partial, initial=initial)
        declare_parameter(self, "weight", weight, self.state)
        if bias:
            start = initial_of_bias(initial)
            stated = Declaration((out_features,), partial=partial, initial=start)
            declare_parameter(self, "bias", stated, self.state)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product for the tokens that are given."""
        check_width(x, self.in_features, "ReplicatedLinear", "It takes all of them on every rank")
        y = F.linear(x, *self.parts[0].weight_and_bias())
        for adapter in self.adapters:
            for _, change in adapter(x):
                y = y + change
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
