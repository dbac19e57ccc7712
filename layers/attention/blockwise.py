"""Compute attention of a block of queries over a block of keys, so that several blocks can be combined.

Each block's output comes with a log-sum for each query: the logarithm of the sum of exponentials of its
scores. Log-sums give the weights with which outputs of several blocks are added.
B batch  H query heads  K key/value heads  G query heads a key/value head  Q queries  T keys  E head dim

Sources: Milakov and Gimelshein 2018; Dao et al. 2022 (FlashAttention), whose backward needs no more than the
whole's output and log-sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ...parallel_state import engine
from ...parallel_state.engine.autograd_and_compiler import differentiable_once, wanted_gradients
from ...parallel_state.engine.kernels import flash_attention, flash_attention_backward
from ..autocast import without_autocast
from ..rounds import rounds
from .scores import ScoreBias, Scores, add_sinks, sinks_gradient

#: Scores that are written out at once where no fused operator computes the block.
_AT_ONCE = 2**26


@dataclass(frozen=True, slots=True)
class BlockAttentionOptions:
    """Describe how one block of attention is computed.

    ``seed`` is the seed of the block's dropout, so that backward draws the same mask. ``mask``: (B or 1, 1,
    Q, T), true where a query sees a key; ``None`` where ``causal`` alone decides. ``soft_cap`` bounds the
    scores, see ``causal_attention``; ``bias`` is added. ``fused``: use torch's own operator where it can.
    """

    scale: float
    causal: bool
    mask: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    soft_cap: float | None = None
    bias: ScoreBias | None = None
    fused: bool = True

    @classmethod
    def of(cls, q_BHSE: Tensor, scores: Scores, **options: Any) -> Self:
        """Return the options of what becomes of the scores of ``q``; the seed of dropout is torch's."""
        seed = int(torch.randint(2**62, (), device="cpu")) if scores.dropout else 0
        scale = q_BHSE.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        return cls(scale, dropout=scores.dropout, seed=seed, soft_cap=scores.soft_cap, **options)


@without_autocast
def attend(
    q_BHQE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, options: BlockAttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return the block's output (B, H, Q, E) and log-sums (B, H, Q), both in at least fp32.

    Values may be narrower than queries and keys; the output is then as wide as the values. A query that sees
    none of the keys has the output 0 and the log-sum minus infinity.
    """
    inner = torch.promote_types(q_BHQE.dtype, torch.float32)
    if _fused(q_BHQE, options):
        k, v = (_repeated(t, q_BHQE) for t in (k_BKTE, v_BKTE))
        out, log_sums = flash_attention(
            q_BHQE, k, widened(v, q_BHQE), causal=options.causal, scale=options.scale
        )
        return out[..., : v.shape[-1]].to(inner), log_sums.to(inner)
    k, v = k_BKTE.to(inner), v_BKTE.to(inner)
    log_sums = k.new_empty(q_BHQE.shape[:3])
    out, drop = k.new_empty((*log_sums.shape, v.shape[-1])), _drop(q_BHQE, k, options)
    for rows in rounds(_slices(q_BHQE, k)):
        scores = _seen(_scores(q_BHQE[:, :, rows].to(inner), k, options), options, rows)
        sums = scores.logsumexp(-1)
        weights = (scores - sums.masked_fill(sums.isneginf(), 0.0).unsqueeze(-1)).exp()
        dropped = drop(rows)
        weighted = _fold(weights if dropped is None else weights * dropped, k) @ v
        out[:, :, rows] = weighted.view(*sums.shape, -1)
        log_sums[:, :, rows] = sums
    return out, log_sums


@without_autocast
def attend_backward(
    grad: Tensor,
    q_BHQE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    out: Tensor,
    log_sums: Tensor,
    options: BlockAttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's part of the gradients of q, k and v, in at least fp32.

    ``out`` (B, H, Q, E), in the inputs' dtype, and ``log_sums`` (B, H, Q) are the results over all keys.
    """
    inner = torch.promote_types(q_BHQE.dtype, torch.float32)
    if _fused(q_BHQE, options):
        k, v = (_repeated(t, q_BHQE) for t in (k_BKTE, v_BKTE))
        grad, wide, out = (widened(t, q_BHQE) for t in (grad, v, out))
        dq, dk, dv = flash_attention_backward(
            grad, q_BHQE, k, wide, out, log_sums, causal=options.causal, scale=options.scale
        )
        dv = dv[..., : v.shape[-1]]
        groups = (k_BKTE.shape[1], -1)
        dk, dv = (t.unflatten(1, groups).sum(2, dtype=inner) for t in (dk, dv))
        return dq.to(inner), dk, dv
    k, v = k_BKTE.to(inner), v_BKTE.to(inner)
    dq, dk, dv = q_BHQE.new_empty(q_BHQE.shape, dtype=inner), torch.zeros_like(k), torch.zeros_like(v)
    drop = _drop(q_BHQE, k, options)
    for rows in rounds(_slices(q_BHQE, k)):
        q, dout = q_BHQE[:, :, rows].to(inner), grad[:, :, rows].to(inner)
        scores = _scores(q, k, options)
        # The derivative of the cap: 1 - tanh^2, before what is not seen becomes infinite.
        slope = None if options.soft_cap is None else 1 - (scores / options.soft_cap) ** 2
        weights = (_seen(scores, options, rows) - log_sums[:, :, rows].unsqueeze(-1)).exp()
        dweights = (_fold(dout, k) @ v.transpose(-1, -2)).view_as(weights)
        kept_weights, dropped = weights, drop(rows)
        if dropped is not None:
            kept_weights, dweights = weights * dropped, dweights * dropped
        dv += _fold(kept_weights, k).transpose(-1, -2) @ _fold(dout, k)
        row_sums = (dout * out[:, :, rows].to(inner)).sum(-1, keepdim=True)
        dscores = weights * (dweights - row_sums) * options.scale
        dscores = _fold(dscores if slope is None else dscores * slope, k)
        dk += dscores.transpose(-1, -2) @ _fold(q, k)
        dq[:, :, rows] = (dscores @ k).view_as(q)
    return dq, dk, dv


def blockwise_attention(
    q_BHSE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    mask: Tensor | None,
    scores: Scores,
    *,
    causal: bool,
    bias: ScoreBias | None = None,
    fused: bool = False,
) -> Tensor:
    """Compute attention whose scores exist only a few rows at a time, in forward and in backward.

    Returns (B, H, S, E), like ``q``. It computes what torch's public operators cannot compute, or only with
    all scores at once: a soft cap, sinks (see ``scores.py``) and a ``bias``. ``mask``: (B or 1, 1, S, T),
    true where a query sees a key; without a mask, ``causal`` says whether keys and queries are the same
    tokens in order. Dropout follows torch's generator. ``fused``: whether torch's fused operators may compute
    the blocks for which they are able to (see ``kernel_checks``).
    """
    options = BlockAttentionOptions.of(q_BHSE, scores, causal=causal, mask=mask, bias=bias, fused=fused)
    both = (partial(function, options=options) for function in (attend, attend_backward))
    out: Tensor = WholeAttention.apply(q_BHSE, k_BKTE, v_BKTE, scores.sinks, *both)
    return out


class WholeAttention(torch.autograd.Function):
    """Call ``attend`` with queries, keys and values, and ``attend_backward`` with what this returned."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        attend: Callable[..., tuple[Tensor, Tensor]],
        attend_backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:
        out, log_sums = attend(q, k, v)
        if sinks is not None:  # after the last block, so that they count once
            out, log_sums = add_sinks(out, log_sums, sinks)
        # In the order of the output projection's input, which is then this tensor and no copy.
        out = out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, sinks, out, log_sums)
        ctx.attend_backward = attend_backward
        return out

    @staticmethod
    @differentiable_once("this attention")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, log_sums = ctx.saved_tensors
        dsinks = None if sinks is None else sinks_gradient(grads[0], out, log_sums, sinks)
        if not any(wanted_gradients(ctx)[:3]):  # the second part of a backward in two
            return None, None, None, dsinks, None, None
        dq, dk, dv = ctx.attend_backward(grads[0], q, k, v, out, log_sums)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


def widened(v_BKTE: Tensor, q_BHQE: Tensor) -> Tensor:
    """Return values as wide as the queries, with zeros at the end: flash attention takes one width."""
    missing = q_BHQE.shape[-1] - v_BKTE.shape[-1]
    return F.pad(v_BKTE, (0, missing)) if missing else v_BKTE


def _fused(q: Tensor, options: BlockAttentionOptions) -> bool:
    changes = (options.mask, options.soft_cap, options.bias)
    plain = not options.dropout and all(change is None for change in changes)
    return options.fused and plain and fused_takes(q)


def fused_takes(q: Tensor) -> bool:
    """Return whether torch's fused operator takes heads of this dtype and width, on this device."""
    if engine.accelerator.has_flash_attention(q.device):
        return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return engine.accelerator.is_host(q.device)


def _repeated(x_BKTE: Tensor, q_BHQE: Tensor) -> Tensor:
    """Repeat key/value heads so that each query head has one."""
    times = q_BHQE.shape[1] // x_BKTE.shape[1]
    return x_BKTE if times == 1 else x_BKTE.repeat_interleave(times, dim=1)


def _fold(x_BHQX: Tensor, k_BKTE: Tensor) -> Tensor:
    """Reshape (B, H, Q, X) to (B, K, G * Q, X): the queries that share a head become rows of one product."""
    folded: Tensor = x_BHQX.unflatten(1, (k_BKTE.shape[1], -1)).flatten(2, 3)
    return folded


def _scores(q_BHQE: Tensor, k_BKTE: Tensor, options: BlockAttentionOptions) -> Tensor:
    """Return the scores (B, H, Q, T), unmasked; they are bounded if there is a soft cap."""
    scores = (_fold(q_BHQE, k_BKTE) @ k_BKTE.transpose(-1, -2)).mul_(options.scale)
    scores = scores.view(*q_BHQE.shape[:3], -1)
    cap = options.soft_cap
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def _seen(scores: Tensor, options: BlockAttentionOptions, rows: slice) -> Tensor:
    """Add the bias, then set scores to minus infinity where a query does not see a key; in place."""
    if options.bias is not None:
        scores += options.bias(rows, scores.dtype)
    if options.mask is not None:
        return scores.masked_fill_(~options.mask[:, :, rows], float("-inf"))
    if options.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(rows.start + 1)
        scores.masked_fill_(later, float("-inf"))
    return scores


def _slices(q: Tensor, k: Tensor) -> list[slice]:
    """Return slices of query rows whose scores fit in memory."""
    batch, heads, queries, _ = q.shape
    length = max(1, _AT_ONCE // (batch * heads * k.shape[2]))
    return [slice(start, min(start + length, queries)) for start in range(0, queries, length)]


def _drop(q: Tensor, k: Tensor, options: BlockAttentionOptions) -> Callable[[slice], Tensor | None]:
    """Return what draws the dropout of slices of query rows, one after the other: 0, or 1 / (1 - p), by which
    their weights are multiplied; it gives ``None`` without dropout.
    """
    if not options.dropout:
        return lambda rows: None
    numbers = engine.accelerator.has_numbers(q.device)  # a device without them has no generator
    generator = torch.Generator(q.device).manual_seed(options.seed) if numbers else None

    def draw(rows: slice) -> Tensor:
        shape = (*q.shape[:2], rows.stop - rows.start, k.shape[2])
        drawn = torch.rand(shape, generator=generator, device=q.device)
        return (drawn >= options.dropout).to(k.dtype) / (1 - options.dropout)

    return draw
