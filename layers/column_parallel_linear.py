"""Define a linear layer whose columns of the product (rows of the weight) are cut over the tensor axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    local,
    shared_units,
)
from .argument_checks import check_no_state, check_width
from .collectives import enter_tensor, gather_from_tensor
from .column_products import column_products
from .linear_extensions import Adapter, Products, initial_of_bias


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
    ``enter_tensor`` returned: several layers then share one collective. Output: (..., out / tensor), or whole
    with ``gather_output``. On one device it is ``nn.Linear``. Raises ``BadInput`` for a cut that is not even.
    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        bias: bool = True,
        *,
        unit: int | Mapping[str, int] = 1,
        shared: Sequence[str] = (),
        gather_output: bool = False,
        entered: bool = False,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        check_no_state(bias, "ColumnParallelLinear", "bias")
        self.state = alone_or(state)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.entered = gather_output, entered
        initial = initial or Uniform(1 / sqrt(in_features))
        self.parts: list[_Rows] = []
        self.adapters: list[Adapter] = []
        self.float8: Products | None = None
        outputs = {"": out_features} if isinstance(out_features, int) else dict(out_features)
        for name, features in outputs.items():
            holder = self if not name else nn.Module()
            if name:
                self.add_module(name, holder)
            whole = unit if isinstance(unit, int) else unit[name]
            rows = _Rows(holder, in_features, features, bias, whole, name in shared, initial, self.state)
            self.parts.append(rows)
        if gather_output and any(part.slice is not None for part in self.parts):
            raise BadInput(
                "linear",
                "gather_output",
                expected=f"outputs whose units tensor={self.state.tensor_size} divides",
                found=f"shared units in {dict(outputs)}",
            )
        self._plain = self.state.tensor_size == 1 and isinstance(out_features, int)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the product, or a tuple of products if ``out_features`` was a mapping."""
        check_width(x, self.in_features, "ColumnParallelLinear", "It takes all of them on every rank")
        if self._plain and not self.adapters and self.float8 is None:  # nn.Linear's own line
            return F.linear(x, cast(Tensor, self.weight), cast(Tensor | None, self.bias))
        held = [part.used() for part in self.parts]
        if self.float8 is None and self._by_one_function:
            outputs = column_products(x, held, self.state)
        else:
            x = x if self.entered else enter_tensor(x, self.state)
            outputs = [F.linear(x, *one) for one in held] if self.float8 is None else self.float8(x, held)
        for adapter in self.adapters:
            for number, change in adapter(x):
                outputs[number] = outputs[number] + change
        if isinstance(self.out_features, int):
            return self._finish(outputs[0])
        return tuple(self._finish(y) for y in outputs)

    @property
    def _by_one_function(self) -> bool:
        """Return whether ``column_products`` computes all outputs, with one sum of the input's gradients over
        the tensor ranks.
        """
        return self.state.tensor_size > 1 and not self.adapters and not self.entered

    def _finish(self, y: Tensor) -> Tensor:
        return gather_from_tensor(y, self.state) if self.gather_output else y

    def extra_repr(self) -> str:
        here = ", ".join(f"({part.here}, {self.in_features})" for part in self.parts)
        return f"in_features={self.in_features}, out_features={self.out_features}, here={here}"


class _Rows:
    """Hold weight and bias of one output of a column-parallel linear, and the rows that this rank
    computes.
    """

    def __init__(
        self,
        holder: nn.Module,
        in_features: int,
        features: int,
        bias: bool,
        unit: int,
        may_share: bool,
        initial: Initial,
        state: ParallelState,
    ) -> None:
        if features % unit:
            raise BadInput("linear", "out_features", expected=f"a multiple of unit={unit}", found=features)
        units, size = features // unit, state.tensor_size
        self.holder = holder
        self.slice: slice | None = None
        cut: Cut | None = Cut(0, unit=unit)
        partial: tuple[str, ...] = ()
        self.here = features // size
        if may_share and units % size:
            needed = shared_units(units, size, state.tensor_index)
            self.slice = slice(needed.start * unit, needed.stop * unit)
            self.here = len(needed) * unit
            cut, partial = None, ("tensor",)
        declare_parameter(
            holder,
            "weight",
            Declaration((features, in_features), cut=cut, partial=partial, initial=initial),
            state,
        )
        if bias:
            start = initial_of_bias(initial)
            declare_parameter(
                holder, "bias", Declaration((features,), cut=cut, partial=partial, initial=start), state
            )
        else:
            holder.register_parameter("bias", None)

    def used(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows of the weight and of the bias that this rank computes with."""
        weight = local(cast(Tensor, self.holder.weight))
        bias = None if self.holder.bias is None else local(cast(Tensor, self.holder.bias))
        if self.slice is not None:
            weight, bias = weight[self.slice], None if bias is None else bias[self.slice]
        return weight, bias
