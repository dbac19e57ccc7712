"""Define the two feed-forward nets of the zoo: gated (Llama) and plain (GPT-2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import BadInput, Initial, ParallelState
from .column_parallel_linear import ColumnParallelLinear
from .cost import Cost, Tokens, cost_of
from .row_parallel_linear import RowParallelLinear


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


#: Hugging Face's ``hidden_act`` names.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation with this Hugging Face name; raise ``BadInput`` if there is none."""
    if name not in ACTIVATIONS:
        raise BadInput("mlp", "hidden_act", expected=f"one of {', '.join(ACTIVATIONS)}", found=repr(name))
    return ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """Compute ``down(act(gate(x)) * up(x))`` with one collective before and one after. Source: Shazeer 2020.

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        act: str = "silu",
        bias: bool = False,
        initial: Initial | None = None,
        out_initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        self.act = activation(act)
        outputs = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up = ColumnParallelLinear(hidden_size, outputs, bias, initial=initial, state=state)
        self.down = RowParallelLinear(
            intermediate_size, hidden_size, bias, initial=out_initial or initial, state=state
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the feed-forward of ``x``, of the same shape."""
        gate_BSF, up_BSF = self.gate_up(x_BSD)
        down: Tensor = self.down(self.act(gate_BSF) * up_BSF)
        return down

    def cost(self, tokens: Tokens) -> Cost:
        between = between_products(self.gate_up, tokens, keeps_output=self.act is F.relu)
        return _in_turn(self.gate_up, between, self.down, tokens)


class MLP(nn.Module):
    """Compute ``down(act(up(x)))`` with one collective before and one after.

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        act: str = "gelu",
        bias: bool = True,
        initial: Initial | None = None,
        out_initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        self.act = activation(act)
        self.up = ColumnParallelLinear(hidden_size, intermediate_size, bias, initial=initial, state=state)
        self.down = RowParallelLinear(
            intermediate_size, hidden_size, bias, initial=out_initial or initial, state=state
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the feed-forward of ``x``, of the same shape."""
        down: Tensor = self.down(self.act(self.up(x_BSD)))
        return down

    def cost(self, tokens: Tokens) -> Cost:
        between = between_products(self.up, tokens, keeps_output=self.act is F.relu)
        if self.act is F.relu and not self.down.keeps_input:
            between += Cost(kept=tokens.bytes(self.up.parts[0].here))
        return _in_turn(self.up, between, self.down, tokens, keeps_output=self.act is F.relu)


def _in_turn(
    into: ColumnParallelLinear,
    between: Cost,
    out: RowParallelLinear,
    tokens: Tokens,
    *,
    keeps_output: bool = False,
) -> Cost:
    """Add up the costs of two products and of what is between them, while the input is there.

    ``keeps_output``: what is between them keeps the input of the second product.
    """
    last = cost_of(out, tokens.after(into))
    if keeps_output and not out.keeps_input:
        last = replace(last, making=last.making - tokens.bytes(into.parts[0].here))
    given = 0.0 if into.keeps_input else tokens.bytes(into.in_features)
    between = between.under(tokens.after(into))
    return cost_of(into, tokens) + between + last + Cost(making=last.making + given)


def between_products(into: ColumnParallelLinear, tokens: Tokens, *, keeps_output: bool = False) -> Cost:
    """Return the cost of the activation between the products, and of the gate if there are two of the first.

    ``keeps_output``: the activation's backward needs what it made, not what it was given (ReLU). The backward
    holds at once the gradients of both sides of the activation or, with a gate, of the product and of its two
    factors; and what the activation made, which the next product no longer needs.
    """
    here = [part.here for part in into.parts]
    gated = len(here) == 2
    made = tokens.bytes(sum(here))
    products = made if into.in_features == tokens.hidden else 0.0
    given = tokens.bytes(here[0]) * keeps_output
    return Cost(
        kept=made + tokens.bytes(here[0]) * gated - given,
        selective=products,
        working=tokens.bytes((2 + (gated or keeps_output)) * here[0]),
    )
