"""Causal attention over the heads that this rank holds.    B batch  S sequence  H heads here  E head dim"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .alibi import Alibi
from .blockwise import blockwise_attention, widened
from .context import context_attention
from .mask import AttentionScope


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Reshape (B, S, H * E) to (B, H, S, E)."""
    return torch.unflatten(x, -1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x_BHSE: Tensor) -> Tensor:
    """Reshape (B, H, S, E) to (B, S, H * E)."""
    return x_BHSE.transpose(1, 2).flatten(-2)


def causal_attention(
    q_BHSE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    scope: AttentionScope | None = None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Alibi | None = None,
) -> Tensor:
    """Compute scaled dot-product attention in which a position sees itself and earlier ones in its ``scope``.

    Returns (B, H, S, E), like ``q``, or as wide as ``v``, whose heads may be narrower. There may be several
    query heads for each key/value head; consecutive query heads then share one. ``scale``: factor of the
    scores; the default is E ** -0.5. ``soft_cap``: bound of the scores, ``soft_cap * tanh(scores /
    soft_cap)`` (Gemma 2, section 2); ``sinks``: one more score of each head, (H,), see ``sinks.py``;
    ``alibi``: biases of the heads of ``q``. Torch's public operators lack these, or need all biases at once,
    so the scores are computed in blocks. With several context ranks
    (``scope``) the call is collective.
    """
    if scope is not None and scope.context is not None:
        return context_attention(
            q_BHSE,
            k_BKSE,
            v_BKSE,
            scope.context,
            dropout=dropout,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi=alibi,
        )
    scope = scope or AttentionScope()
    if soft_cap is not None or sinks is not None or alibi is not None:
        return blockwise_attention(
            q_BHSE,
            k_BKSE,
            v_BKSE,
            scope.mask,
            causal=scope.causal,
            dropout=dropout,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
            bias=None if alibi is None else alibi.bias(*scope.positions(q_BHSE)),
        )
    grouped = q_BHSE.shape[1] != k_BKSE.shape[1]
    if grouped and scope.mask is not None:
        # A GPU's flash attention takes no mask and its memory-efficient one no groups: between them all
        # scores would be written out.
        k_BKSE, v_BKSE = (t.repeat_interleave(q_BHSE.shape[1] // t.shape[1], dim=1) for t in (k_BKSE, v_BKSE))
        grouped = False
    out_BHSE = F.scaled_dot_product_attention(
        q_BHSE,
        k_BKSE,
        widened(v_BKSE, q_BHSE),
        attn_mask=scope.mask,
        is_causal=scope.causal,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=grouped,
    )
    return out_BHSE if v_BKSE.shape[-1] == q_BHSE.shape[-1] else out_BHSE[..., : v_BKSE.shape[-1]]
