"""Compute causal attention over the heads of this rank.    B batch  S sequence  H heads here  E head dim"""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...parallel_state.engine import accelerator
from .backends import HALF, AttentionCall, Backend, PinnedBackend, choose_backend
from .blockwise import blockwise_attention, widened
from .flex import flex_attention
from .mask import AttentionScope
from .ring_and_gathered_attention import context_attention
from .scores import Alibi, Scores
from .varlen import varlen_attention

_KERNELS: dict[Backend, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


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
    backend: PinnedBackend = "auto",
) -> Tensor:
    """Compute scaled dot-product attention in which a position sees itself and earlier ones in its ``scope``.

    Returns (B, H, S, E), like ``q``, or as wide as ``v``, if its heads have another width. There may be
    several query heads for each key/value head; consecutive query heads then share one. ``scale``: factor of
    the scores; the default is E ** -0.5. ``soft_cap``: bound of the scores, ``soft_cap * tanh(scores /
    soft_cap)`` (Gemma 2, section 2); ``sinks``: one more score of each head, (H,), see ``scores.py``;
    ``alibi``: biases of the heads of ``q``. ``backend``: what computes it; ``auto`` takes the first of the
    table in ``backends.py`` that can. With several context ranks the call is collective, in blocks.
    """
    if (missing := v_BKSE.shape[-1] - q_BHSE.shape[-1]) > 0:  # no kernel takes values that are wider
        scale = q_BHSE.shape[-1] ** -0.5 if scale is None else scale
        q_BHSE, k_BKSE = F.pad(q_BHSE, (0, missing)), F.pad(k_BKSE, (0, missing))
    scores = Scores(scale, soft_cap, sinks, alibi, dropout)
    scope = scope or AttentionScope()
    if scope.over_context:
        return context_attention(q_BHSE, k_BKSE, v_BKSE, scope, scores)
    device, widths = q_BHSE.device.type, (q_BHSE.shape[-1], v_BKSE.shape[-1])
    call = AttentionCall(device, q_BHSE.dtype, *widths, scope.masked, scope.cached, dropout > 0, scores.kind)
    chosen = choose_backend(call, backend)
    mask_of_kernel, causal = scope.takes(chosen, q_BHSE), scope.causal
    if chosen == "varlen":
        return varlen_attention(q_BHSE, k_BKSE, v_BKSE, mask_of_kernel, scale=scale)
    if chosen == "flex":
        return flex_attention(q_BHSE, k_BKSE, v_BKSE, mask_of_kernel, scores)
    if chosen == "blockwise":
        bias, (mask, fused) = None if alibi is None else alibi.bias(*scope.places(q_BHSE)), mask_of_kernel
        return blockwise_attention(
            q_BHSE, k_BKSE, v_BKSE, mask, scores, causal=causal, bias=bias, fused=fused
        )
    grouped = q_BHSE.shape[1] != k_BKSE.shape[1]
    in_full = accelerator.is_accelerator(q_BHSE.device) and q_BHSE.dtype not in HALF
    if grouped and (scope.masked or chosen == "efficient" or in_full):
        # A GPU's flash attention takes no mask and no fp32, and its memory-efficient one no groups: between
        # them all scores would be written out.
        k_BKSE, v_BKSE = (t.repeat_interleave(q_BHSE.shape[1] // t.shape[1], dim=1) for t in (k_BKSE, v_BKSE))
        grouped = False
    kernel = _KERNELS.get(chosen)
    with nullcontext() if kernel is None else sdpa_kernel(kernel):
        out_BHSE = F.scaled_dot_product_attention(
            q_BHSE,
            k_BKSE,
            widened(v_BKSE, q_BHSE),
            attn_mask=mask_of_kernel,
            is_causal=causal,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=grouped,
        )
    return out_BHSE if v_BKSE.shape[-1] == q_BHSE.shape[-1] else out_BHSE[..., : v_BKSE.shape[-1]]
