"""Cross entropy over logits whose vocabulary is cut over the tensor axis; the logits are never gathered."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..parallel_state import BadInput, ParallelState, alone_or
from .autocast import without_autocast
from .embedding import check_ids, padded_vocabulary
from .token_losses import IGNORE, LossTerms, Rows, logits_gradient, token_losses


class _CrossEntropy(torch.autograd.Function):
    """Save the logits for backward, in their own dtype, and a few numbers for each token."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, terms: LossTerms, overwrite: bool, state: ParallelState
    ) -> Tensor:
        losses, rows = token_losses(logits.detach().flatten(0, -2), labels.flatten(), terms, state)
        ctx.save_for_backward(logits, *rows)
        ctx.terms, ctx.overwrite, ctx.state = terms, overwrite, state
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        # Logits that were overwritten cannot be unpacked again: autograd refuses a second backward.
        logits, *rows = ctx.saved_tensors
        flat, grad = logits.detach().flatten(0, -2), grads[0].flatten()
        gradient = logits_gradient(flat, Rows(*rows), grad, ctx.terms, ctx.state, in_place=ctx.overwrite)
        return gradient.view(logits.shape), None, None, None, None


_cross_entropy: Callable[..., Tensor] = _CrossEntropy.apply  # torch declares it without types


@without_autocast
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = IGNORE,
    compiled: bool = False,
    overwrite: bool = False,
    state: ParallelState | None = None,
) -> Tensor:
    """Return the loss of each token, (B, S), in at least fp32; it is zero where the label is
    ``ignore_index``.

    ``logits``: (B, S, padded / tensor), this rank's columns. ``labels``: (B, S), already shifted.
    ``label_smoothing``: as in ``F.cross_entropy``, spread over the true ``vocab_size``. ``z_loss``: factor of
    the squared log-sum-exp of a token's logits, which is added to its loss (Chowdhery et al. 2022, section 5:
    1e-4). There are two small all-reduces: the maximum, and three sums. Sum the result and divide it by the
    number of valid tokens *of the whole step* (see ``valid_tokens``). The logits must stay as they are until
    backward. A label outside the vocabulary raises ``IndexError`` on a CPU; a GPU stops with an assertion.
    ``compiled``: let torch's compiler make a kernel of each reading of the logits. ``overwrite``: backward
    writes the gradient over the logits, which nobody else may need then; it can run only once.
    """
    state = alone_or(state)
    check_ids(labels, vocab_size, but=ignore_index)
    size = state.tensor.size
    padded = padded_vocabulary(vocab_size, size)
    if size > 1 and logits.shape[-1] * size not in (vocab_size, padded):
        raise BadInput(
            "vocab_parallel_cross_entropy", "logits",
            expected=f"{padded // size} columns: a part of {vocab_size}", found=logits.shape[-1],
            todo="Do not gather the logits before it",
        )  # fmt: skip
    terms = LossTerms(vocab_size, label_smoothing, z_loss, ignore_index, compiled=compiled)
    return _cross_entropy(logits, labels, terms, overwrite, state)


def bounded(logits: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(logits / cap)``: smooth, and within plus or minus ``cap`` (Gemma 2, section 2)."""
    return (logits / cap).tanh() * cap


def valid_tokens(labels: Tensor, *, ignore_index: int = IGNORE) -> Tensor:
    """Return the number of labels that count, as a scalar int64 tensor."""
    return (labels != ignore_index).sum()
