"""Normalisation over the hidden dim. Under sequence parallelism each rank normalises its own tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import (
    Constant,
    Declaration,
    DeclaredModule,
    ParallelState,
    alone_or,
    declare_parameter,
    local,
)
from .argument_checks import check_no_state
from .cost import Cost, Tokens, norm_cost


class RMSNorm(DeclaredModule):
    """Compute ``x / rms(x) * (offset + weight)`` over the last dim, in at least fp32.

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism. With ``offset`` 1 (Gemma)
    the weight starts at 0, so that the factor starts at 1 in both forms. The weight is whole on every rank.
    Its gradient is partial if the tokens are split over the tensor axis, and always if each rank normalises
    its own ``heads`` (B, H, S, E). Source: Zhang and Sennrich 2019.
    """

    weight: nn.Parameter

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        heads: bool = False,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        check_no_state(eps, "RMSNorm", "eps")
        self.dim, self.eps, self.offset = dim, eps, offset
        self.heads, self.state = heads, alone_or(state)
        _declare_norm(self, "weight", dim, 1.0 - offset, self.state, heads=heads)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised ``x``, of the same shape."""
        weight = local(self.weight)
        if not self.offset:
            return F.rms_norm(x, (self.dim,), weight, self.eps)
        # The sum is taken in fp32: near 1 bf16 has too few digits for a small weight.
        inner = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(inner), (self.dim,), self.offset + weight.to(inner), self.eps).to(x.dtype)

    def cost(self, tokens: Tokens) -> Cost:
        """Return the cost for tokens as they are between the blocks; for ``heads``, for all of them."""
        here = tokens if self.heads else tokens.between_blocks(self.state)
        trained, wide = self.weight.requires_grad, bool(self.offset)
        factor = Cost(kept=self.dim * tokens.inner if wide else 0.0)  # offset + weight
        return factor + norm_cost(here, self.dim, rms=True, trained=trained, wide=wide)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class LayerNorm(DeclaredModule):
    """Apply ``nn.LayerNorm`` over the last dim; weight and bias are whole on every rank.

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, dim: int, eps: float = 1e-5, *, state: ParallelState | None = None) -> None:
        super().__init__()
        check_no_state(eps, "LayerNorm", "eps")
        self.dim, self.eps = dim, eps
        self.state = alone_or(state)
        _declare_norm(self, "weight", dim, 1.0, self.state)
        _declare_norm(self, "bias", dim, 0.0, self.state)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised ``x``, of the same shape."""
        return F.layer_norm(x, (self.dim,), local(self.weight), local(self.bias), self.eps)

    def cost(self, tokens: Tokens) -> Cost:
        return norm_cost(tokens.between_blocks(self.state), self.dim, rms=False, trained=True)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


def _declare_norm(
    module: nn.Module, name: str, dim: int, value: float, state: ParallelState, *, heads: bool = False
) -> None:
    partial = ("tensor",) if state.sequence or heads else ()
    declare_parameter(module, name, Declaration((dim,), partial=partial, initial=Constant(value)), state)
