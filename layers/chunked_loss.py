"""Compute the output layer and its cross entropy together, a few tokens at a time: logits are never whole.

The gradients of hidden states and weight come out of the same pass: nothing is computed twice. What is kept
until backward is the gradient of the weight (in at least fp32) and of the hidden states; what is needed in
between are the logits of one chunk.

One autograd function gives both gradients here, so a schedule that separates the gradient of the input from
that of the weights (zero bubble) has nothing to separate in the head. It would run this backward twice, which
is refused. GPipe, 1F1B and interleaved 1F1B do not separate them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ..parallel_state import BadInput, ParallelState, alone_or
from .autocast import without_autocast
from .collectives import enter_tensor
from .cost import Cost, Tokens
from .embedding import check_ids, padded_vocabulary
from .loss import IGNORE, loss_sends, losses_in_place

#: Rows of a product that is held before it is added to a sum of another dtype.
_ROWS = 8192


class _Chunked(torch.autograd.Function):
    """Sum of the losses; its two gradients are made in forward, in ``chunk`` tokens' logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        vocab_size: int,
        smoothing: float,
        ignore: int,
        chunk: int,
        wanted: tuple[bool, bool, bool],
        logit_cap: float | None,
        state: ParallelState,
    ) -> Tensor:
        x_ND, y_N = hidden.detach().reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        w_VD = weight.detach()
        inner = torch.promote_types(hidden.dtype, torch.float32)
        chunk = min(chunk, len(y_N))
        logits_CV = x_ND.new_empty(chunk, len(w_VD))
        dx_ND = torch.empty_like(x_ND) if wanted[0] else None
        # Summed over the chunks in the loss' dtype: in bf16 each chunk would round the sum.
        dw_VD = torch.zeros_like(w_VD, dtype=inner) if wanted[1] else None
        db_V = w_VD.new_zeros(len(w_VD), dtype=inner) if wanted[2] else None
        one, loss = x_ND.new_ones((), dtype=inner), x_ND.new_zeros((), dtype=inner)
        for start in range(0, len(y_N), max(chunk, 1)):
            x_CD, y_C = x_ND[start : start + chunk], y_N[start : start + chunk]
            part = torch.mm(x_CD, w_VD.t(), out=logits_CV[: len(y_C)])
            if bias is not None:
                part += bias.detach()
            capped, slope = part.to(inner), None
            if logit_cap is not None:
                share = (capped / logit_cap).tanh_()
                capped, slope = share * logit_cap, 1 - share**2
            losses, gradient = losses_in_place(capped, y_C, vocab_size, smoothing, ignore, state)
            loss += losses.sum()
            if not any(wanted):
                continue
            grad_CV = gradient.scaled(one, vocab_size, smoothing, state)
            if slope is not None:
                grad_CV *= slope
            if db_V is not None:
                db_V += grad_CV.sum(0)
            if grad_CV.dtype != part.dtype:
                grad_CV = part.copy_(grad_CV)
            if dx_ND is not None:
                torch.mm(grad_CV, w_VD, out=dx_ND[start : start + chunk])
            if dw_VD is not None:
                _add_product(dw_VD, grad_CV.t(), x_CD)
        ctx.save_for_backward(dx_ND, dw_VD, db_V)
        ctx.shape, ctx.dtype = hidden.shape, weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert not getattr(ctx, "ran", False), "the weight's gradient was scaled in place: backward runs once"
        ctx.ran = True
        dx_ND, dw_VD, db_V = ctx.saved_tensors
        scale = grads[0]
        # The scale is one over the step's tokens: rounded to bf16 it would be wrong for all gradients alike.
        dx = None if dx_ND is None else (dx_ND.to(scale.dtype) * scale).to(dx_ND.dtype).view(ctx.shape)
        # In place: a second copy of the weight's gradient is what this function is there to spare.
        dw = None if dw_VD is None else dw_VD.mul_(scale).to(ctx.dtype)
        db = None if db_V is None else db_V.mul_(scale).to(ctx.dtype)
        return dx, dw, db, *[None] * 8


_chunked: Callable[..., Tensor] = _Chunked.apply  # torch declares it without types


@without_autocast
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    chunk: int,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = IGNORE,
    logit_cap: float | None = None,
    state: ParallelState | None = None,
) -> Tensor:
    """Return the sum over tokens of ``vocab_parallel_cross_entropy(F.linear(hidden, weight), labels)``: a
    scalar.

    ``hidden``: (B, S, D), or (B, S / tensor, D) with sequence parallelism. ``weight``: (padded / tensor, D),
    this rank's rows; ``bias``: (padded / tensor,). ``labels``: (B, S), shifted. ``chunk``: number of tokens
    whose logits exist at once. The memory beyond inputs and gradients is ``chunk * rows * (bytes of hidden +
    4)``, or without the 4 if hidden is already fp32. Each chunk has two small all-reduces over the tensor
    axis. ``logit_cap``: bound of the logits (see ``bounded``); memory then holds two more chunks. Backward
    may run once.
    """
    state = alone_or(state)
    if chunk < 1:
        raise BadInput("memory", "loss_chunk", expected="at least 1 token", found=chunk)
    check_ids(labels, vocab_size, but=ignore_index)
    inner = torch.promote_types(hidden.dtype, weight.dtype)  # which autocast outside of it may have set apart
    hidden, weight = enter_tensor(hidden.to(inner), state), weight.to(inner)
    bias = None if bias is None else bias.to(inner)
    on = torch.is_grad_enabled()
    wanted = tuple(on and one is not None and one.requires_grad for one in (hidden, weight, bias))
    settings = (vocab_size, label_smoothing, ignore_index, chunk, wanted, logit_cap, state)
    return _chunked(hidden, weight, bias, labels, *settings)


def chunked_cross_entropy_cost(
    tokens: Tokens,
    vocab_size: int,
    chunk: int,
    *,
    trained: bool = True,
    logit_cap: float | None = None,
    state: ParallelState | None = None,
) -> Cost:
    """Return the cost of ``chunked_cross_entropy``; ``trained``: whether the weight gets a gradient."""
    state = alone_or(state)
    compute, inner = tokens.compute, tokens.inner
    cast = compute if compute < inner else 0
    bounds = 0 if logit_cap is None else 2 * inner  # the bounded logits, and the derivative of the bound
    columns = padded_vocabulary(vocab_size, state.tensor_size) // state.tensor_size
    weight = columns * tokens.hidden * trained
    # A trained output layer has counted the hidden states.
    hidden = tokens.bytes(tokens.hidden) * (1 if trained else 2)
    return Cost(
        kept=weight * inner + hidden,
        working=min(chunk, tokens.count) * columns * (inner + cast + bounds) + weight * cast,
        sends=loss_sends(tokens, ceil(tokens.count / chunk), state),
    )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, in blocks of rows if the product has another dtype than the sum."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
        return
    for rows, part in zip(a.split(_ROWS), total.split(_ROWS), strict=True):
        part += rows @ b
