"""Define a linear layer whose columns of the product (rows of the weight) are cut over the tensor axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import (
    BadInput,
    Cut,
    Declaration,
    DeclaredModule,
    Initial,
    ParallelState,
    Uniform,
    alone_or,
    declare_parameter,
    shared_units,
)
from .argument_checks import check_no_state, check_width
from .collectives import enter_tensor
from .column_products import column_products
from .linear_extensions import Adapter, OutputPart, Products, initial_of_bias, products


class ColumnParallelLinear(DeclaredModule):
    """Compute ``y = x W^T + b`` with the rows of ``W`` (the columns of ``y``) cut over the tensor axis.

    With one ``out_features`` the parameters are ``weight`` (out, in) and ``bias`` (out), as in ``nn.Linear``.
    With a mapping, several products share the input and one collective: ``{"q": 64, "k": 16}`` has the
    parameters ``q.weight`` and ``k.weight`` and returns a tuple in the order of the mapping.

    ``unit``: number of rows that stay together (a head); a mapping has one for each output. Outputs named in
    ``shared`` (key and value heads) may have fewer units than there are ranks, or a number that the ranks do
    not divide. Then every rank stores all units of this output, but computes only the units that its part of
    the other outputs needs. The gradients of such an output are summed over the ranks.

    Input: (..., in), or (B, S / tensor, in) with sequence parallelism. With ``entered`` the input is what
    ``enter_tensor`` returned: several layers then share one collective. Output: (..., out / tensor). On one
    device it is ``nn.Linear``. Raises ``BadInput`` for a cut that is not even. Source: Shoeybi et al. 2019,
    section 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        bias: bool = True,
        *,
        unit: int | Mapping[str, int] = 1,
        shared: Sequence[str] = (),
        entered: bool = False,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        check_no_state(bias, "ColumnParallelLinear", "bias")
        self.state, self.entered = alone_or(state), entered
        self.in_features, self.out_features = in_features, out_features
        self.adapters: list[Adapter] = []
        self.float8: Products | None = None
        #: Whether selective checkpointing computes the products again.
        self.recomputed = False
        outputs = {"": out_features} if isinstance(out_features, int) else out_features
        units = dict.fromkeys(outputs, unit) if isinstance(unit, int) else unit
        initial = initial or Uniform(1 / sqrt(in_features))
        self.parts = [
            self._declare(name, features, bias, units[name], name in shared, initial)
            for name, features in outputs.items()
        ]
        self._plain = self.state.tensor_size == 1 and isinstance(out_features, int)

    def _declare(
        self, name: str, features: int, bias: bool, unit: int, may_share: bool, initial: Initial
    ) -> OutputPart:
        """Declare weight and bias of one output, in a module of its name."""
        if features % unit:
            raise BadInput("linear", "out_features", expected=f"a multiple of unit={unit}", found=features)
        holder = nn.Module() if name else self
        if name:
            self.add_module(name, holder)
        units, size, rows = features // unit, self.state.tensor_size, None
        weight = Declaration((features, self.in_features), Cut(0, unit=unit), initial=initial)
        if may_share and units % size:
            needed = shared_units(units, size, self.state.tensor_index)
            rows = slice(needed.start * unit, needed.stop * unit)
            weight = replace(weight, cut=None, partial=("tensor",))
        declare_parameter(holder, "weight", weight, self.state)
        if bias:
            start = initial_of_bias(initial)
            declare_parameter(holder, "bias", replace(weight, shape=(features,), initial=start), self.state)
        else:
            holder.register_parameter("bias", None)
        return OutputPart(holder, rows, features // size if rows is None else rows.stop - rows.start)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the product, or a tuple of products if ``out_features`` was a mapping."""
        check_width(x, self.in_features, "ColumnParallelLinear", "It takes all of them on every rank")
        if self._plain and not self.adapters and self.float8 is None:  # nn.Linear's own line
            return F.linear(x, cast(Tensor, self.weight), cast(Tensor | None, self.bias))
        weights_and_biases = [part.weight_and_bias() for part in self.parts]
        if self.float8 is None and not self.adapters and not self.entered:
            outputs = column_products(x, weights_and_biases, self.state)
        else:
            x = x if self.entered else enter_tensor(x, self.state)
            outputs = (self.float8 or products)(x, weights_and_biases)
        for adapter in self.adapters:
            for number, change in adapter(x):
                outputs[number] = outputs[number] + change
        return outputs[0] if isinstance(self.out_features, int) else tuple(outputs)

    def extra_repr(self) -> str:
        here = ", ".join(f"({part.here}, {self.in_features})" for part in self.parts)
        return f"in_features={self.in_features}, out_features={self.out_features}, here={here}"
