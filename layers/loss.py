"""Cross entropy over logits whose vocabulary is cut over the tensor axis; the logits are never gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..parallel_state import BadInput, ParallelState, alone_or, engine
from .autocast import without_autocast
from .cost import Cost, Send, Tokens
from .embedding import check_ids, padded_vocabulary

IGNORE = -100


class LogitsGradient(NamedTuple):
    """Hold what the gradient of a loss by its logits needs: the local softmax and the labels' places."""

    softmax: Tensor
    target: Tensor
    elsewhere: Tensor
    valid: Tensor

    def scaled(self, grad: Tensor, vocab_size: int, smoothing: float, state: ParallelState) -> Tensor:
        """Return the logits' gradient times ``grad`` (one number a token, or one for all), made in place."""
        out, columns = self.softmax, _true_columns(self.softmax, vocab_size, state)
        if smoothing:
            out[..., :columns] -= smoothing / vocab_size
        hit = (self.elsewhere.logical_not().to(out.dtype) * (1 - smoothing)).unsqueeze(-1)
        out.scatter_add_(-1, self.target.unsqueeze(-1), -hit)
        out *= (grad * self.valid).unsqueeze(-1)
        return out


def losses_in_place(
    x: Tensor, labels: Tensor, vocab_size: int, smoothing: float, ignore: int, state: ParallelState
) -> tuple[Tensor, LogitsGradient]:
    """Return each token's loss; turn the logits ``x``, in the loss's dtype, into their softmax in place."""
    first, true_columns = state.tensor_index * x.shape[-1], _true_columns(x, vocab_size, state)
    x[..., true_columns:] = float("-inf")
    top = x.amax(dim=-1)
    if state.tensor_size > 1:
        top = engine.all_reduce(top, state.tensor_group, "max")
    x -= top.unsqueeze(-1)

    target = labels - first
    elsewhere = (target < 0) | (target >= true_columns)
    target = target.masked_fill(elsewhere, 0)
    picked = x.gather(-1, target.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
    # Label smoothing needs the sum of the (shifted) logits, taken before they turn into probabilities.
    spread = x[..., :true_columns].sum(-1) if smoothing else torch.zeros_like(picked)
    x.exp_()
    sums = torch.stack([x.sum(-1), picked, spread])
    if state.tensor_size > 1:
        sums = engine.all_reduce(sums, state.tensor_group)
    total, picked, spread = sums.unbind(0)
    log_total = total.log()
    loss = (1 - smoothing) * (log_total - picked) + smoothing * (log_total - spread / vocab_size)
    valid = labels != ignore
    x /= total.unsqueeze(-1)
    return loss.masked_fill(~valid, 0.0), LogitsGradient(x, target, elsewhere, valid)


def _true_columns(x: Tensor, vocab_size: int, state: ParallelState) -> int:
    """Return how many of this rank's columns are not padding."""
    columns = x.shape[-1]
    return min(max(vocab_size - state.tensor_index * columns, 0), columns)


class _CrossEntropy(torch.autograd.Function):
    """Save the local softmax (in the loss's dtype) for backward, and nothing else of the logits' size."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        smoothing: float,
        ignore: int,
        state: ParallelState,
    ) -> Tensor:
        # "fp32 inside", so that fp64 stays fp64; always a copy, since it becomes the softmax in place.
        x = logits.detach().to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        loss, gradient = losses_in_place(x, labels, vocab_size, smoothing, ignore, state)
        ctx.save_for_backward(*gradient)
        ctx.smoothing, ctx.vocab_size, ctx.state = smoothing, vocab_size, state
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        softmax, *where = ctx.saved_tensors
        gradient = LogitsGradient(softmax.clone(), *where)
        grad = gradient.scaled(grads[0], ctx.vocab_size, ctx.smoothing, ctx.state)
        return grad.to(ctx.dtype), None, None, None, None, None


_cross_entropy: Callable[..., Tensor] = _CrossEntropy.apply  # torch declares it without types


@without_autocast
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = IGNORE,
    state: ParallelState | None = None,
) -> Tensor:
    """Return the loss of each token, (B, S), in at least fp32; it is zero where the label is
    ``ignore_index``.

    ``logits``: (B, S, padded / tensor), this rank's columns. ``labels``: (B, S), already shifted.
    ``label_smoothing``: as in ``F.cross_entropy``, spread over the true ``vocab_size``. There are two small
    all-reduces: the maximum, and three sums. Sum the result and divide it by the number of valid tokens *of
    the whole step* (see ``valid_tokens``). A label outside the vocabulary raises ``IndexError`` on a CPU; a
    GPU stops with an assertion.
    """
    state = alone_or(state)
    check_ids(labels, vocab_size, but=ignore_index)
    size = state.tensor_size
    padded = padded_vocabulary(vocab_size, size)
    if size > 1 and logits.shape[-1] * size not in (vocab_size, padded):
        raise BadInput(
            "vocab_parallel_cross_entropy", "logits",
            expected=f"{padded // size} columns: a part of {vocab_size}", found=logits.shape[-1],
            todo="Do not gather the logits before it",
        )  # fmt: skip
    return _cross_entropy(logits, labels, vocab_size, label_smoothing, ignore_index, state)


def cross_entropy_cost(
    tokens: Tokens, vocab_size: int, *, logit_cap: float | None = None, state: ParallelState | None = None
) -> Cost:
    """Return the cost of ``vocab_parallel_cross_entropy`` over logits that may be ``bounded``.

    The softmax is kept and its gradient is made beside it; where a pipeline holds several micro-batches, each
    has its logits too.
    """
    state = alone_or(state)
    compute, inner = tokens.compute, tokens.inner
    numbers = tokens.count * (padded_vocabulary(vocab_size, state.tensor_size) // state.tensor_size)
    logits = compute if state.layout.pipeline > 1 else 0  # which torch's stage keeps
    tanh = 0 if logit_cap is None else compute
    cast = compute if compute < inner else 0
    return Cost(
        kept=numbers * (inner + logits + tanh),
        working=numbers * (inner + cast),
        sends=loss_sends(tokens, 1, state),
    )


def loss_sends(tokens: Tokens, chunks: int, state: ParallelState) -> tuple[Send, ...]:
    """Return what a loss in so many pieces sends: of each token its maximum, and three sums."""
    size = 4 * tokens.count * tokens.inner
    return (Send("tensor", "all_reduce", size, count=2 * chunks, what="loss"),) * (state.tensor_size > 1)


def bounded(logits: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(logits / cap)``: smooth, and within plus or minus ``cap`` (Gemma 2, section 2)."""
    return (logits / cap).tanh() * cap


def valid_tokens(labels: Tensor, *, ignore_index: int = IGNORE) -> Tensor:
    """Return the number of labels that count, as a scalar int64 tensor."""
    return (labels != ignore_index).sum()
