"""Define a linear layer whose features of the input (columns of the weight) are cut over the tensor axis."""

from __future__ import annotations

from dataclasses import replace
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
from .collectives import leave_sends, leave_tensor, split_to_tensor
from .cost import Cost, Send, Tokens, matrix
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

    @property
    def keeps_input(self) -> bool:
        """Return whether backward needs the input: a product whose weight is frozen does not."""
        return self.weight.requires_grad or any(adapter.keeps_input for adapter in self.adapters)

    def adding(self, tokens: Tokens) -> float:
        """Return the bytes of what an adapter makes and of its sum with the product. Only where a later
        operator keeps the output does a recomputation come to this sum.
        """
        return 2 * tokens.bytes(self.out_features) * bool(self.adapters)

    def cost(self, tokens: Tokens) -> Cost:
        state, width, made = self.state, self._width, tokens.bytes(self.out_features)
        # Selective checkpointing keeps a product that starts from the hidden width, and a sum over the ranks.
        again = made if width == tokens.hidden else 0.0
        if state.tensor_size > 1:
            again += tokens.between_blocks(state).bytes(self.out_features)
        working = made * state.sequence + tokens.bytes(width) * (2 if self.adapters else 1)
        gradient = self._width * self.out_features * tokens.compute * self.weight.requires_grad
        product = replace(tokens, reached=tokens.reached or self.weight.requires_grad)
        casts = Cost() if self.float8 is None else self.float8.cost(product, width, [self.out_features])
        # The bias is added after the sum over the ranks, which alone needs no gradient for it.
        trained = any(one.requires_grad for name, one in self.named_parameters() if name != "bias")
        summed = replace(tokens, reached=tokens.reached or trained)
        found = casts + Cost(
            kept=tokens.bytes(width) if self.keeps_input else 0.0,
            selective=again,
            # The output's gradient is that of the residual stream, but where it is gathered.
            working=working + casts.working,
            with_gradient=working + gradient,
            outputs=made,
            repeated=0 if summed.reached else -1,
        )
        found += matrix(tokens, self.in_features * self.out_features, trained=self.weight.requires_grad)
        for adapter in self.adapters:
            found += adapter.cost(tokens)
        # A product whose weight is frozen does not keep its input, which is there until the adapters end.
        found += Cost(making=made + (0.0 if self.keeps_input else tokens.bytes(width)))
        found += Cost(sends=leave_sends(summed, self.out_features, state))
        if self.scatter_input and state.tensor_size > 1 and tokens.reached:
            found += Cost(sends=(Send("tensor", "all_gather", tokens.bytes(width), forward=False),))
        return found

    def extra_repr(self) -> str:
        here = (self.out_features, self.in_features // self.state.tensor_size)
        return f"in_features={self.in_features}, out_features={self.out_features}, here={here}"
