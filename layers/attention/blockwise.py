"""Attention of a block of queries over a block of keys, in pieces that can be put together and taken back.

Each piece comes with the log of each query's sum of exponentials, by which it is weighed against the others.
B batch  H query heads  K key/value heads  G query heads a key/value head  Q queries  T keys  E head dim

Sources: Milakov and Gimelshein 2018; Dao et al. 2022 (FlashAttention), whose backward needs no more than the
whole's output and log-sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ...parallel_state import engine
from ..autocast import without_autocast

#: Scores that are written out at once where no fused operator computes the block.
_AT_ONCE = 2**26


@dataclass(frozen=True, slots=True)
class How:
    """``seed``: of the block's dropout, so that backward draws the same; ``mask``: (B or 1, 1, Q, T), true
    where a query sees a key, ``None`` if ``causal`` says it all. ``fused``: by torch's own operator if that
    can.
    """

    scale: float
    causal: bool
    mask: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    fused: bool = True


@without_autocast
def attend(q_BHQE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """The block's output (B, H, Q, E) and log-sums (B, H, Q), both in at least fp32.

    Of a query that sees none of the keys they are 0 and minus infinity.
    """
    inner = torch.promote_types(q_BHQE.dtype, torch.float32)
    if _fused(q_BHQE, how):
        k, v = (_repeated(t, q_BHQE) for t in (k_BKTE, v_BKTE))
        out, log_sums = engine.flash_attention(q_BHQE, k, v, causal=how.causal, scale=how.scale)
        return out.to(inner), log_sums.to(inner)
    k, v = k_BKTE.to(inner), v_BKTE.to(inner)
    outs, sums = [], []
    for rows, dropped in _slices(q_BHQE, k, how):
        scores = _scores(q_BHQE[:, :, rows].to(inner), k, how, rows)
        log_sums = scores.logsumexp(-1)
        weights = (scores - log_sums.masked_fill(log_sums.isneginf(), 0.0).unsqueeze(-1)).exp()
        outs.append(_fold(weights if dropped is None else weights * dropped, k) @ v)
        outs[-1] = outs[-1].view(*log_sums.shape, -1)
        sums.append(log_sums)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


@without_autocast
def attend_backward(
    grad: Tensor, q_BHQE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, out: Tensor, log_sums: Tensor, how: How
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v, in at least fp32.

    ``out`` (B, H, Q, E), of the inputs' dtype, and ``log_sums`` (B, H, Q) are those over all keys.
    """
    inner = torch.promote_types(q_BHQE.dtype, torch.float32)
    if _fused(q_BHQE, how):
        k, v = (_repeated(t, q_BHQE) for t in (k_BKTE, v_BKTE))
        dq, dk, dv = engine.flash_attention_backward(
            grad, q_BHQE, k, v, out, log_sums, causal=how.causal, scale=how.scale
        )
        groups = (k_BKTE.shape[1], -1)
        dk, dv = (t.unflatten(1, groups).sum(2, dtype=inner) for t in (dk, dv))
        return dq.to(inner), dk, dv
    k, v = k_BKTE.to(inner), v_BKTE.to(inner)
    dk, dv, dqs = torch.zeros_like(k), torch.zeros_like(v), []
    for rows, dropped in _slices(q_BHQE, k, how):
        q, dout = q_BHQE[:, :, rows].to(inner), grad[:, :, rows].to(inner)
        weights = (_scores(q, k, how, rows) - log_sums[:, :, rows].unsqueeze(-1)).exp()
        dweights = (_fold(dout, k) @ v.transpose(-1, -2)).view_as(weights)
        kept = weights
        if dropped is not None:
            kept, dweights = weights * dropped, dweights * dropped
        dv += _fold(kept, k).transpose(-1, -2) @ _fold(dout, k)
        rest = (dout * out[:, :, rows].to(inner)).sum(-1, keepdim=True)
        dscores = _fold(weights * (dweights - rest) * how.scale, k)
        dk += dscores.transpose(-1, -2) @ _fold(q, k)
        dqs.append((dscores @ k).view_as(q))
    return torch.cat(dqs, dim=2), dk, dv


@cache
def fused_is_right(device: str) -> bool:
    """Whether torch's fused operators, of which the ones with log-sums are private, give what is written out.

    Looked at once a process, on a small block of a few keys among more; if not, a warning says so.
    """
    dtype, tolerance = (torch.bfloat16, 0.05) if device == "cuda" else (torch.float32, 1e-4)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 64, 64, generator=generator).to(device, dtype) for _ in range(4))
    try:
        for causal in (False, True):
            how = How(0.125, causal)
            found, expected = (_of_more(grad, q, k, v, replace(how, fused=one)) for one in (True, False))
            for one, other in zip(found, expected, strict=True):
                worst = float((one.double() - other.double()).abs().max() / other.double().abs().max())
                if not worst <= tolerance:
                    raise RuntimeError(f"a difference of {worst:.1e}")
    except RuntimeError as error:
        said = (
            f"torch {torch.__version__}'s fused attention on {device} is not used over context ranks: {error}"
        )
        warnings.warn(said, stacklevel=2)
        return False
    return True


def _of_more(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, how: How) -> list[Tensor]:
    """A block's output and log-sums, and its gradients as if there were keys of the same weight besides."""
    out, log_sums = attend(q, k, v, how)
    return [out, log_sums, *attend_backward(grad, q, k, v, out.to(q.dtype), log_sums + 0.7, how)]


def _fused(q: Tensor, how: How) -> bool:
    if not how.fused or how.mask is not None or how.dropout:
        return False
    if q.device.type == "cuda":
        return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cpu"


def _repeated(x_BKTE: Tensor, q_BHQE: Tensor) -> Tensor:
    """A key/value head for each query head."""
    times = q_BHQE.shape[1] // x_BKTE.shape[1]
    return x_BKTE if times == 1 else x_BKTE.repeat_interleave(times, dim=1)


def _fold(x_BHQX: Tensor, k_BKTE: Tensor) -> Tensor:
    """(B, H, Q, X) -> (B, K, G * Q, X): the queries that share a head become rows of one product."""
    folded: Tensor = x_BHQX.unflatten(1, (k_BKTE.shape[1], -1)).flatten(2, 3)
    return folded


def _scores(q_BHQE: Tensor, k_BKTE: Tensor, how: How, rows: slice) -> Tensor:
    """(B, H, Q, T), minus infinity where a query does not see a key."""
    scores = (_fold(q_BHQE, k_BKTE) @ k_BKTE.transpose(-1, -2)).mul_(how.scale)
    scores = scores.view(*q_BHQE.shape[:3], -1)
    if how.mask is not None:
        return scores.masked_fill_(~how.mask[:, :, rows], float("-inf"))
    if how.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(rows.start + 1)
        scores.masked_fill_(later, float("-inf"))
    return scores


def _slices(q: Tensor, k: Tensor, how: How) -> Iterator[tuple[slice, Tensor | None]]:
    """Rows of queries whose scores are few enough, each with its dropout: 0, or 1 / (1 - p)."""
    batch, heads, queries, _ = q.shape
    each = max(1, _AT_ONCE // (batch * heads * k.shape[2]))
    generator = torch.Generator(q.device).manual_seed(how.seed) if how.dropout else None
    for start in range(0, queries, each):
        rows = slice(start, min(start + each, queries))
        dropped = None
        if generator is not None:
            shape = (batch, heads, rows.stop - rows.start, k.shape[2])
            drawn = torch.rand(shape, generator=generator, device=q.device)
            dropped = (drawn >= how.dropout).to(k.dtype) / (1 - how.dropout)
        yield rows, dropped
