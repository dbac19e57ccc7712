"""Define a linear layer whose features of the input (columns of the weight) are cut over the tensor axis."""

from __future__ import annotations

from math import sqrt

from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import (
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
from .argument_checks import check_no_state, check_width
from .collectives import leave_tensor, split_to_tensor
from .linear_extensions import Adapter, Products, initial_of_bias

_PIECE = "A rank takes its piece, as a ColumnParallelLinear leaves it; scatter_input=True cuts a whole one"


class RowParallelLinear(DeclaredModule):
    """Compute ``y = x W^T + b`` with the columns of ``W`` (the features of ``x``) cut over the tensor axis.

    Input: (..., in / tensor), as a column-parallel layer leaves it; with ``scatter_input`` the input is whole
    and is cut here. Output: (..., out) whole, or (B, S / tensor, out) with sequence parallelism. The bias is
    added once, after the sum. On one device it is ``nn.Linear``. Raises ``BadInput`` for a cut that is not
    even. Source: Shoeybi et al. 2019, section 3.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        unit: int = 1,
        scatter_input: bool = False,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        check_no_state(bias, "RowParallelLinear", "bias")
        self.state = alone_or(state)
        self.in_features, self.out_features = in_features, out_features
        self.scatter_input = scatter_input
        self.adapters: list[Adapter] = []
        self.float8: Products | None = None
        initial = initial or Uniform(1 / sqrt(in_features))
        declare_parameter(
            self,
            "weight",
            Declaration((out_features, in_features), cut=Cut(1, unit=unit), initial=initial),
            self.state,
        )
        if bias:
            # Under sequence parallelism each rank adds it to its own tokens, so its gradient is a part.
            partial = ("tensor",) if self.state.sequence else ()
            start = initial_of_bias(initial)
            declare_parameter(
                self, "bias", Declaration((out_features,), partial=partial, initial=start), self.state
            )
        else:
            self.register_parameter("bias", None)
        self._alone, self._width = self.state.tensor_size == 1, in_features // self.state.tensor_size

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, summed over the tensor ranks."""
        if self.scatter_input:
            x = split_to_tensor(x, self.state)
        check_width(x, self._width, "RowParallelLinear", _PIECE)
        alone = self._alone
        if alone and not self.adapters and self.float8 is None:  # nn.Linear's own line
            return F.linear(x, self.weight, self.bias)
        weight, bias = local(self.weight), None if self.bias is None else local(self.bias)
        added = bias if alone else None
        y = F.linear(x, weight, added) if self.float8 is None else self.float8(x, [(weight, added)])[0]
        for adapter in self.adapters:  # before the sum over the ranks: its products are parts too
            for _, change in adapter(x):
                y = y + change
        if alone:
            return y
        y = leave_tensor(y, self.state)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        here = (self.out_features, self.in_features // self.state.tensor_size)
        return f"in_features={self.in_features}, out_features={self.out_features}, here={here}"
