"""Linear layers over the tensor axis: how W is cut, and the collective before or after its product.

==========  ===========  ====================================  ============================================
layer       W (out, in)  before the product                    after it
==========  ===========  ====================================  ============================================
column      rows         ``enter_tensor``, unless ``entered``  nothing
row         columns      nothing                               ``leave_tensor``, unless ``entered``; the bias
replicated  whole        nothing                               nothing
==========  ===========  ====================================  ============================================

On one device each is ``nn.Linear``. Source: Shoeybi et al. 2019, section 3.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import BadInput, DeclaredModule, ParallelState, declare_parameter, require, shared_units
from ..parallel_state.declaration import Cut, Declaration
from ..parallel_state.initial_weights import Constant, Initial, Uniform
from .collectives import enter_tensor, leave_tensor
from .column_products import Products, WeightsAndBiases, column_products, products

#: Returns the terms that an adapter (LoRA) adds to a layer's outputs, by the output's number. Its input is
#: the layer's after the first collective; the terms are added before the last one.
Adapter = Callable[[Tensor], Mapping[int, Tensor]]


def cut_units(
    shape: tuple[int, ...], unit: int, may_share: bool, state: ParallelState
) -> tuple[Declaration, slice | None]:
    """Cut dim 0 of a parameter between units (heads); also return the rows that this rank computes with.

    ``may_share``: if the tensor axis does not divide the number of units, every rank stores them all,
    computes those that its part of the layer's other outputs needs, and has a part of their gradient. Else
    the rows are ``None``, for all that the rank holds.
    """
    units, size = shape[0] // unit, state.tensor.size
    if not may_share or units % size == 0:
        return Declaration(shape, Cut(0, unit=unit)), None
    needed = shared_units(units, size, state.tensor.index)
    return Declaration(shape, partial=("tensor",)), slice(needed.start * unit, needed.stop * unit)


def declare_product(
    part: DeclaredModule, weight: Declaration, bias: Declaration | None, rows: slice | None
) -> None:
    """Declare the parameters of one product in its ``part``, with the rows that this rank computes with."""
    part.rows_here = rows
    declare_parameter(part, "weight", weight, part.state)
    declare_parameter(part, "bias", bias, part.state)


def weights_and_biases(parts: Iterable[DeclaredModule]) -> list[tuple[Tensor, Tensor | None]]:
    """Return what this rank computes with for each product."""
    return [(part.here(), None if part.bias is None else part.here("bias")) for part in parts]


class ParallelLinear(DeclaredModule):
    """Compute ``y = x W^T + b``; the classes below say how W is cut.

    With one ``out_features`` the parameters are ``weight`` (out, in) and ``bias`` (out), as in ``nn.Linear``.
    With a mapping, ``{"q": 64, "k": 16}``, they are ``q.weight``, ``k.weight`` and so on, and a tuple is
    returned in the order of the mapping. With ``entered`` the layer lies between an ``enter_tensor`` and a
    ``leave_tensor`` of others, and has no collective. Raises ``BadInput`` for a cut that is not even.
    """

    #: The dim of W that the tensor ranks cut, ``None`` if each holds W whole.
    cut_dim: ClassVar[int | None] = None
    #: What a rank should give as input, for the refusal of another width.
    input_advice: ClassVar[str] = "It takes all of them on every rank"
    weight: nn.Parameter
    bias: nn.Parameter | None

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
        super().__init__(state)
        refuse_state(bias, type(self).__name__, "bias")
        self.in_features, self.out_features = in_features, out_features
        self.entered = entered
        self.adapters: list[Adapter] = []
        self.float8: Products | None = None
        #: Whether selective checkpointing computes the products again; it keeps a sum over ranks, not terms.
        self.recomputed = self.cut_dim == 1 and (entered or self.state.tensor.size > 1)
        self._single = isinstance(out_features, int)
        self._width = in_features // self.state.tensor.size if self.cut_dim == 1 else in_features
        outputs = {"": out_features} if isinstance(out_features, int) else out_features
        units = dict.fromkeys(outputs, unit) if isinstance(unit, int) else unit
        initial = initial or Uniform(1 / sqrt(in_features))
        # Uniform beside uniform weights, as in torch.
        of_bias = initial if isinstance(initial, Uniform) else Constant(0.0)
        for name, features in outputs.items():
            if name:
                self.add_module(name, DeclaredModule(state))
            weight, vector, rows = self._declare(features, units[name], name in shared)
            weight, vector = replace(weight, initial=initial), replace(vector, initial=of_bias)
            declare_product(self.parts[name], weight, vector if bias else None, rows)

    @property
    def parts(self) -> dict[str, DeclaredModule]:
        """Return what holds each product's parameters, by the outputs' names, "" for a single one."""
        return {"": self} if self._single else cast(dict[str, DeclaredModule], self._modules)

    def _declare(
        self, features: int, unit: int, may_share: bool
    ) -> tuple[Declaration, Declaration, slice | None]:
        """Declare weight and bias of one product; also return the rows of them that this rank uses."""
        shape, rows = (features, self.in_features), None
        # With sequence parallelism each rank meets its own tokens.
        weight = Declaration(shape, partial=("tensor",) if self.state.sequence else ())
        if self.cut_dim == 0:
            require(features % unit == 0, "linear", "out_features", f"a multiple of unit={unit}", features)
            weight, rows = cut_units(shape, unit, may_share, self.state)
        bias = replace(weight, shape=(features,))
        if self.cut_dim == 1:
            weight = replace(weight, cut=Cut(1, unit=unit), partial=())
            if self.entered and self.state.tensor.size > 1:  # it is zero on all ranks but the first
                bias = replace(bias, partial=("tensor",))
        return weight, bias, rows

    def forward(self, x: Tensor) -> Any:
        """Return the product, or a tuple of products if ``out_features`` was a mapping."""
        if x.shape[-1] != self._width:
            expected, shape = f"{self._width} features on the last dim", f"shape {[*x.shape]}"
            layer, todo = type(self).__name__, self.input_advice
            raise BadInput(layer, "input", expected=expected, found=shape, todo=todo)
        if self._single and self.state.tensor.size == 1 and not self.adapters and self.float8 is None:
            return F.linear(x, self.weight, self.bias)  # nn.Linear's own line
        outputs = self._outputs(x, weights_and_biases(self.parts.values()))
        return outputs[0] if self._single else tuple(outputs)

    def _outputs(self, x: Tensor, weights_and_biases: WeightsAndBiases) -> list[Tensor]:
        outputs = (self.float8 or products)(x, weights_and_biases)
        for adapter in self.adapters:
            for number, change in adapter(x).items():
                outputs[number] = outputs[number] + change
        return outputs

    def extra_repr(self) -> str:
        of_rank = ", ".join(f"({len(part.here())}, {self._width})" for part in self.parts.values())
        bias = all(part.bias is not None for part in self.parts.values())
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={bias}, here={of_rank}"


class ColumnParallelLinear(ParallelLinear):
    """Cut the rows of W, and so the columns of ``y``; several products share the input and one collective.

    ``unit``: number of rows that stay together (a head); a mapping has one for each output. Outputs named in
    ``shared`` (key and value heads) may have fewer units than there are ranks, or a number that the ranks do
    not divide. Then every rank stores all units of this output, but computes only the units that its part of
    the other outputs needs. The gradients of such an output are summed over the ranks.

    Input: (..., in), or (B, S / tensor, in) with sequence parallelism; with ``entered``, what
    ``enter_tensor`` returned: several layers then share one collective. Output: (..., out / tensor).
    """

    cut_dim = 0

    def _outputs(self, x: Tensor, weights_and_biases: WeightsAndBiases) -> list[Tensor]:
        if self.float8 is None and not self.adapters and not self.entered:
            return column_products(x, weights_and_biases, self.state)
        return super()._outputs(x if self.entered else enter_tensor(x, self.state), weights_and_biases)


class RowParallelLinear(ParallelLinear):
    """Cut the columns of W, the features of ``x``; the product is summed over the ranks.

    Input: (..., in / tensor), as a column-parallel layer or ``split_to_tensor`` leaves it. Output: (..., out)
    whole, or (B, S / tensor, out) with sequence parallelism. The bias is added once, after the sum. With
    ``entered`` the output is this rank's term of the sum, for ``leave_tensor`` after other terms are added;
    the first rank's has the bias.
    """

    __call__: Callable[..., Tensor]  # it has one output
    cut_dim = 1
    input_advice = (
        "A rank takes its piece, as a ColumnParallelLinear leaves it; split_to_tensor cuts a whole one"
    )

    def _outputs(self, x: Tensor, weights_and_biases: WeightsAndBiases) -> list[Tensor]:
        if self.state.tensor.size == 1:
            return super()._outputs(x, weights_and_biases)
        ((weight, bias),) = weights_and_biases
        (y,) = super()._outputs(x, [(weight, None)])  # adapters' terms are parts of the sum too
        if not self.entered:
            y = leave_tensor(y, self.state)
        elif bias is not None:
            bias = bias * float(self.state.tensor.index == 0)
        return [y if bias is None else y + bias]


class ReplicatedLinear(ParallelLinear):
    """Hold W whole on every tensor rank and compute without any collective.

    Input: (B, S, in), or (B, S / tensor, in) with sequence parallelism. Output: (B, S, out), or (B, S /
    tensor, out). For products that are narrower than the hidden states, such as DeepSeek's latents.
    """


def refuse_state(value: object, layer: str, key: str) -> None:
    """Refuse a state given by position, which would be taken for another argument, and cut nothing."""
    todo = "The state is a keyword: state=..."
    require(not isinstance(value, ParallelState), layer, key, "no state", "a ParallelState", todo)
