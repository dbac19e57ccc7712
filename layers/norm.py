"""Normalisation over the hidden dim. Under sequence parallelism each rank normalises its own tokens."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import Constant, Declaration, DeclaredModule, ParallelState, declare_parameter, local
from .argument_checks import alone_or, check_no_state


class RMSNorm(DeclaredModule):
    """``x / rms(x) * weight`` over the last dim, fp32 inside. (B, S, D) in and out.

    The weight lies whole on every rank; where the tokens are split over the tensor axis its gradient is a
    part, and always where each rank normalises its own ``heads`` (B, H, S, E). Source: Zhang and Sennrich
    2019.
    """

    weight: nn.Parameter

    def __init__(
        self, dim: int, eps: float = 1e-6, *, heads: bool = False, state: ParallelState | None = None
    ) -> None:
        super().__init__()
        check_no_state(eps, "RMSNorm", "eps")
        self.dim, self.eps = dim, eps
        _declare_norm(self, "weight", dim, 1.0, alone_or(state), heads=heads)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.dim,), local(self.weight), self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class LayerNorm(DeclaredModule):
    """``nn.LayerNorm`` over the last dim, (B, S, D) in and out; weight and bias whole on every rank."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, dim: int, eps: float = 1e-5, *, state: ParallelState | None = None) -> None:
        super().__init__()
        check_no_state(eps, "LayerNorm", "eps")
        self.dim, self.eps = dim, eps
        state = alone_or(state)
        _declare_norm(self, "weight", dim, 1.0, state)
        _declare_norm(self, "bias", dim, 0.0, state)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.dim,), local(self.weight), local(self.bias), self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


def _declare_norm(
    module: nn.Module, name: str, dim: int, value: float, state: ParallelState, *, heads: bool = False
) -> None:
    partial = ("tensor",) if state.sequence or heads else ()
    declare_parameter(module, name, Declaration((dim,), partial=partial, initial=Constant(value)), state)
