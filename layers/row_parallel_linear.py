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
)
from .argument_checks import check_no_state, check_width
from .collectives import leave_tensor
from .linear_extensions import Adapter, OutputPart, Products, initial_of_bias, products

_PIECE = "A rank takes its piece, as a ColumnParallelLinear leaves it; split_to_tensor cuts a whole one"


class RowParallelLinear(DeclaredModule):
    """Compute ``y = x W^T + b`` with the columns of ``W`` (the features of ``x``) cut over the tensor axis.

    Input: (..., in / tensor), as a column-parallel layer or ``split_to_tensor`` leaves it. Output: (..., out)
    whole, or (B, S / tensor, out) with sequence parallelism. The bias is added once, after the sum. With
    ``partial`` the output is this rank's term of the sum, for ``leave_tensor`` after other terms are added;
    the first rank's has the bias. On one device it is ``nn.Linear``. Raises ``BadInput`` for a cut that is
    not even. Source: Shoeybi et al. 2019, section 3.
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
        partial: bool = False,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        check_no_state(bias, "RowParallelLinear", "bias")
        self.state, self.partial = alone_or(state), partial
        self.in_features, self.out_features = in_features, out_features
        self.adapters: list[Adapter] = []
        self.float8: Products | None = None
        self.parts = [OutputPart(self, None, out_features)]
        initial = initial or Uniform(1 / sqrt(in_features))
        weight = Declaration((out_features, in_features), Cut(1, unit=unit), initial=initial)
        declare_parameter(self, "weight", weight, self.state)
        if bias:
            # Under sequence parallelism each rank adds it to its own tokens, so its gradient is a part; with
            # ``partial`` it is zero on all ranks but the first.
            parts = ("tensor",) if self.state.sequence or (partial and self.state.tensor_size > 1) else ()
            added = Declaration((out_features,), partial=parts, initial=initial_of_bias(initial))
            declare_parameter(self, "bias", added, self.state)
        else:
            self.register_parameter("bias", None)
        #: Selective checkpointing keeps the sum over the ranks, not its terms.
        self.recomputed = partial or self.state.tensor_size > 1
        self._alone, self._width = self.state.tensor_size == 1, in_features // self.state.tensor_size

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, summed over the tensor ranks."""
        check_width(x, self._width, "RowParallelLinear", _PIECE)
        if self._alone and not self.adapters and self.float8 is None:  # nn.Linear's own line
            return F.linear(x, self.weight, self.bias)
        weight, bias = self.parts[0].weight_and_bias()
        (y,) = (self.float8 or products)(x, [(weight, bias if self._alone else None)])
        for adapter in self.adapters:  # before the sum over the ranks: its products are parts too
            for _, change in adapter(x):
                y = y + change
        if self._alone:
            return y
        if not self.partial:
            y = leave_tensor(y, self.state)
        elif bias is not None:
            bias = bias * float(self.state.tensor_index == 0)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        here = (self.out_features, self._width)
        return f"in_features={self.in_features}, out_features={self.out_features}, here={here}"
