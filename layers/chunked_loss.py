"""Compute the output layer and its cross entropy together, for a chunk of tokens at a time.

The logits of all tokens never exist at once. The gradients of the hidden states and of the weight are
computed in the forward pass, so nothing is computed twice. They are kept until backward, the weight's in at
least fp32. While they are computed, the logits of one chunk exist.

Zero-bubble schedules compute the gradient of a stage's input first and the gradients of its weights later.
Here one autograd function gives both, so they cannot be separated: such a schedule would run this backward
twice, which is refused. GPipe, 1F1B and interleaved 1F1B run it once.
"""

from typing import Any

import torch
from torch import Tensor

from ..parallel_state import ParallelState, alone_or, require
from ..parallel_state.engine import accelerator
from ..parallel_state.engine.autograd_and_compiler import differentiable_once
from .autocast import without_autocast
from .collectives import enter_tensor
from .embedding import check_ids, padded_vocabulary
from .loss import IGNORE, LossTerms, check_columns, logits_gradient, token_losses
from .rounds import rounds

#: Bytes of logits, of a device, up to which memory is not worth a thought.
LOGITS = 64 * 2**20
#: Rows of a product that is held before it is added to a sum of another dtype.
_ROWS = 4096


class _Chunked(torch.autograd.Function):
    """Sum of the losses times ``scale``; its gradients are made in forward, from ``chunk`` tokens' logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: Tensor,
        terms: LossTerms,
        chunk: int,
        needed: tuple[bool, bool, bool],
        sums: torch.dtype,
        state: ParallelState,
    ) -> Tensor:
        x_ND, y_N = hidden.detach().reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        w_VD = weight.detach()
        chunk = max(min(chunk, len(y_N)), 1)
        if chunk >= len(y_N):
            sums = w_VD.dtype  # one product: nothing is summed
        logits_CV = x_ND.new_empty(chunk, len(w_VD))
        dx_ND = torch.empty_like(x_ND) if needed[0] else None
        unwritten = torch.empty_like if len(y_N) else torch.zeros_like
        dw_VD = unwritten(w_VD, dtype=sums) if needed[1] else None
        db_V = w_VD.new_zeros(len(w_VD), dtype=scale.dtype) if needed[2] else None
        loss = torch.zeros_like(scale)
        for start in rounds(range(0, len(y_N), chunk)):
            x_CD, y_C = x_ND[start : start + chunk], y_N[start : start + chunk]
            part = torch.mm(x_CD, w_VD.t(), out=logits_CV[: len(y_C)])
            if bias is not None:
                part += bias.detach()
            losses, rows = token_losses(part, y_C, terms, state)
            loss += losses.sum()
            if not any(needed):
                continue
            grad_CV = logits_gradient(part, rows, scale, terms, state, in_place=True)
            if db_V is not None:
                db_V += grad_CV.sum(0, dtype=scale.dtype)
            if dx_ND is not None:
                torch.mm(grad_CV, w_VD, out=dx_ND[start : start + chunk])
            if dw_VD is not None:
                _add_product(dw_VD, grad_CV.t(), x_CD, first=start == 0)
        ctx.save_for_backward(dx_ND, dw_VD, db_V)
        ctx.shape, ctx.dtype, ctx.ran = hidden.shape, weight.dtype, False
        return loss * scale

    @staticmethod
    @differentiable_once("chunked_cross_entropy", "F.cross_entropy of gather_logits has them")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.ran:
            raise RuntimeError(
                "chunked_cross_entropy: backward runs once, since it scales the gradients in place; "
                "call vocab_parallel_cross_entropy where it must run again (retain_graph=True)"
            )
        ctx.ran = True
        dx_ND, dw_VD, db_V = ctx.saved_tensors
        # Exact in any dtype if the whole scale was in forward: then this one is 1.
        dx = None if dx_ND is None else _scaled(dx_ND, grads[0], dx_ND.dtype).view(ctx.shape)
        dw = None if dw_VD is None else _scaled(dw_VD, grads[0], ctx.dtype)
        db = None if db_V is None else _scaled(db_V, grads[0], ctx.dtype)
        return dx, dw, db, *[None] * 7


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
    z_loss: float = 0.0,
    ignore_index: int = IGNORE,
    logit_cap: float | None = None,
    scale: Tensor | None = None,
    sums: torch.dtype | None = None,
    compiled: bool = False,
    state: ParallelState | None = None,
) -> Tensor:
    """Return the sum of ``vocab_parallel_cross_entropy(F.linear(hidden, weight), labels)`` times ``scale``.

    ``hidden``: (B, S, D), or (B, S / tensor, D) with sequence parallelism. ``weight``: (padded / tensor, D),
    this rank's rows; ``bias``: (padded / tensor,). ``labels``: (B, S), shifted. ``chunk``: number of tokens
    whose logits exist at once (``automatic_chunk`` chooses one). ``logit_cap``: bound of the logits (see
    ``bounded``). ``scale``: a tensor of one number; multiplying the result instead would round the gradients
    once more. ``sums``: dtype in which the weight's gradient is summed over the chunks; default: at least
    fp32. ``compiled``: as for ``vocab_parallel_cross_entropy``.

    Beside inputs and gradients, memory holds the logits of a chunk, in the dtype of the hidden states, and
    the sum of the weight's gradient. Each chunk has two small all-reduces over the tensor axis. Backward may
    run only once; a second time it raises ``RuntimeError``.
    """
    state = alone_or(state)
    require(chunk >= 1, "memory", "loss_chunk", "at least 1 token", chunk)
    check_ids(labels, vocab_size, but=ignore_index)
    check_columns(len(weight), vocab_size, state, "weight")
    # Autocast outside of it may have set the two apart.
    compute = torch.promote_types(hidden.dtype, weight.dtype)
    inner = torch.promote_types(compute, torch.float32)
    hidden, weight = enter_tensor(hidden.to(compute), state), weight.to(compute)
    bias = None if bias is None else bias.to(compute)
    on = torch.is_grad_enabled()
    needed = tuple(on and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias))
    terms = LossTerms(vocab_size, label_smoothing, z_loss, ignore_index, logit_cap, compiled)
    factor = hidden.new_ones((), dtype=inner) if scale is None else scale.to(hidden.device, inner)
    kept_dtype = torch.promote_types(compute, sums or inner)
    total: Tensor = _Chunked.apply(
        hidden, weight, bias, labels, factor, terms, chunk, needed, kept_dtype, state
    )
    return total


def automatic_chunk(
    tokens: int,
    width: int,
    vocab_size: int,
    *,
    compute: int = 4,
    gpu: bool = True,
    sums: int = 4,
    trained: bool = True,
    state: ParallelState | None = None,
) -> int:
    """Return how many tokens' logits ``chunked_cross_entropy`` should make at once; 0: the plain loss.

    The plain loss is taken if all logits need at most ``LOGITS`` bytes. Otherwise a chunk's logits may
    take a third of the bytes of the sum (the weight's gradient), but at least ``LOGITS`` bytes: each
    chunk reads and writes the whole sum once. On a GPU with a trained weight they may take as many bytes
    as the sum, because there reading and writing the sum takes as long as the product of a thousand
    tokens. If all logits need no more than such a chunk and the sum together, one chunk has all tokens.
    ``tokens``: of a micro-batch on this rank. ``width``: numbers of a hidden state. ``compute``,
    ``sums``: bytes of one number of the logits and of the sum. ``trained``: whether the weight gets a
    gradient, so that there is a sum.
    """
    state = alone_or(state)
    columns = padded_vocabulary(vocab_size, state.tensor.size) // state.tensor.size
    whole = tokens * columns * compute
    if whole <= LOGITS:
        return 0
    total = columns * width * max(sums, compute)
    most = max(LOGITS, total if trained and gpu else total // 3)
    if whole <= most + total * trained:
        return tokens
    chunk = most // (columns * compute)
    step = 128 if gpu else 32  # rows that kernels of products take at once
    return max(chunk // step * step, min(chunk, step), 1)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add ``a @ b`` to ``total``; it is not rounded on the way to a sum of more digits.

    ``first``: ``total`` holds nothing yet, and is written without being read.
    """
    beta = 0 if first else 1
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta)
        return
    # A product of 16 bits that is not rounded to them.
    exact = accelerator.has_wide_sums(a.device) and total.dtype == torch.float32
    for rows, part in zip(a.split(_ROWS), total.split(_ROWS), strict=True):
        if not exact:
            part.addmm_(rows.to(total.dtype), b.to(total.dtype), beta=beta)
        elif first:
            part.copy_(torch.mm(rows, b, out_dtype=total.dtype))
        else:
            part += torch.mm(rows, b, out_dtype=total.dtype)


def _scaled(total: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``total * scale`` in ``dtype``, within the memory of ``total``, a few rows at a time."""
    if total.dtype == dtype:
        return total.mul_(scale)
    out = total.view(-1).view(dtype)[: total.numel()].view(total.shape)
    for rows, part in zip(out.split(_ROWS), total.split(_ROWS), strict=True):
        rows.copy_(part * scale)
    return out
