"""Causal attention over the heads that this rank holds.    B batch  S sequence  H heads here  E head dim"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...parallel_state import ParallelState
from .context import context_attention
from .mask import AttentionScope


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(B, S, H * E) -> (B, H, S, E)."""
    return torch.unflatten(x, -1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x_BHSE: Tensor) -> Tensor:
    """(B, H, S, E) -> (B, S, H * E)."""
    return x_BHSE.transpose(1, 2).flatten(-2)


def causal_attention(
    q_BHSE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    scope: AttentionScope | None = None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention: each position sees itself and what came before, within the ``scope``.

    (B, H, S, E) like ``q``. Query heads may be a multiple of the key/value heads: each of these then serves
    as many consecutive query heads. Over several context ranks (``scope``) it is collective.
    """
    if scope is not None and scope.context is not None:
        return context_attention(q_BHSE, k_BKSE, v_BKSE, scope.context, dropout=dropout, scale=scale)
    grouped = q_BHSE.shape[1] != k_BKSE.shape[1]
    scope = scope or AttentionScope()
    if grouped and scope.mask is not None:
        # A GPU's flash attention takes no mask and its memory-efficient one no groups: between them all
        # scores would be written out.
        k_BKSE, v_BKSE = (t.repeat_interleave(q_BHSE.shape[1] // t.shape[1], dim=1) for t in (k_BKSE, v_BKSE))
        grouped = False
    return F.scaled_dot_product_attention(
        q_BHSE,
        k_BKSE,
        v_BKSE,
        attn_mask=scope.mask,
        is_causal=scope.causal,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=grouped,
    )


class SharedHeads:
    """Lines up key/value heads with this rank's query heads where the tensor axis does not divide them.

    ``ColumnParallelLinear(shared=...)`` gives each rank the key/value heads that its query heads need. Where
    those do not serve equal runs of query heads, they are repeated one by one here; otherwise this does
    nothing.
    """

    def __init__(self, query_heads: int, key_value_heads: int, *, state: ParallelState | None = None) -> None:
        state = state or ParallelState.alone()
        size, index = state.tensor_size, state.tensor_index
        group, here = query_heads // key_value_heads, query_heads // size
        first = key_value_heads * index // size
        needed = [q // group - first for q in range(index * here, (index + 1) * here)]
        held = -(-key_value_heads * (index + 1) // size) - first
        even = here % held == 0 and needed == [j // (here // held) for j in range(here)]
        self._pick = None if even else needed

    def __call__(self, x_BKSE: Tensor) -> Tensor:
        if self._pick is None:
            return x_BKSE
        return x_BKSE.index_select(1, torch.tensor(self._pick, device=x_BKSE.device))
