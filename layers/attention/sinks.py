"""Attention sinks: each head has one more score, learnt, that takes a share of the softmax and has no value.

B batch  H query heads here  S queries  E head dim

Sources: Xiao et al. 2023; GPT-OSS's model card (2025), section 2.2.
"""

import torch
from torch import Tensor, nn

from ...parallel_state import (
    Constant,
    Cut,
    Declaration,
    DeclaredModule,
    Initial,
    ParallelState,
    alone_or,
    declare_parameter,
)


class Sinks(DeclaredModule):
    """Hold the sinks of an attention layer: ``weight``, (heads,), of which a rank has those of its heads."""

    weight: nn.Parameter

    def __init__(
        self, heads: int, *, initial: Initial | None = None, state: ParallelState | None = None
    ) -> None:
        super().__init__()
        declare_parameter(
            self, "weight", Declaration((heads,), Cut(0), initial=initial or Constant(0.0)), alone_or(state)
        )


def add_sinks(out_BHSE: Tensor, log_sums_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sums with the sinks, from those over all keys; call it once for each query."""
    both_BHS = torch.logaddexp(log_sums_BHS, sinks_H.to(log_sums_BHS.dtype).view(-1, 1))
    return out_BHSE * (log_sums_BHS - both_BHS).exp().unsqueeze(-1), both_BHS


def sinks_gradient(grad_BHSE: Tensor, out_BHSE: Tensor, log_sums_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of the sinks, (H,); output and log-sums are those of ``add_sinks``.

    The gradients of queries, keys and values need no rule of their own: ``attend_backward`` takes the same
    output and log-sums.
    """
    inner = log_sums_BHS.dtype
    shares_BHS = (sinks_H.to(inner).view(-1, 1) - log_sums_BHS).exp()
    rest_BHS = (grad_BHSE.to(inner) * out_BHSE.to(inner)).sum(-1)
    return -(shares_BHS * rest_BHS).sum((0, 2)).to(sinks_H.dtype)
