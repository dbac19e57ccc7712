"""Define the two feed-forward nets of the zoo: gated (Llama) and plain (GPT-2)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import Initial, ParallelState, require
from .parallel_linear import ColumnParallelLinear, RowParallelLinear

_gelu_tanh = partial(F.gelu, approximate="tanh")

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
    require(name in ACTIVATIONS, "mlp", "hidden_act", f"one of {', '.join(ACTIVATIONS)}", repr(name))
    return ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """Compute ``down(act(gate(x)) * up(x))`` with one collective before and one after. Source: Shazeer 2020.

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism. With ``entered`` it has no
    collective: the input is what ``enter_tensor`` returned, and the output a term for ``leave_tensor``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        act: str = "silu",
        bias: bool = False,
        entered: bool = False,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        self.act, self.entered = activation(act), entered
        outputs = {"gate": intermediate_size, "up": intermediate_size}
        common: dict[str, Any] = {"bias": bias, "entered": entered, "initial": initial, "state": state}
        self.gate_up = ColumnParallelLinear(hidden_size, outputs, **common)
        self.down = RowParallelLinear(intermediate_size, hidden_size, **common)
        self.down.recomputed = True  # it joins the residual stream, where nothing needs it again

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the feed-forward of ``x``, of the same shape."""
        gate_BSF, up_BSF = self.gate_up(x_BSD)
        return self.down(self.act(gate_BSF) * up_BSF)


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
        self.down.recomputed = True  # it joins the residual stream, where nothing needs it again

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the feed-forward of ``x``, of the same shape."""
        return self.down(self.act(self.up(x_BSD)))
