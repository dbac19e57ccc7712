"""Cross entropy over logits whose vocabulary is cut over the tensor axis; the logits are never gathered.

Logits are read twice, in their own dtype; arithmetic is in at least fp32, a few rows at a time, which stay
in the cache: nothing else of the logits' size exists. Compiled, each reading is one kernel.

N tokens  V columns of this rank
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..parallel_state import BadInput, ParallelState, alone_or, engine
from ..parallel_state.engine import accelerator
from ..parallel_state.engine.autograd_and_compiler import differentiable_once
from .autocast import without_autocast
from .compile import or_plain
from .embedding import check_ids, padded_vocabulary
from .rounds import rounds

#: Label of a token that no loss counts.
IGNORE = -100
#: Numbers that are computed at once: 4 MB in fp32 on a CPU, 32 MB on another device.
BLOCK_ON_CPU, _BLOCK = 2**20, 2**23


@dataclass(frozen=True)
class LossTerms:
    """Describe the loss of a token whose logits l have the log-sum-exp Z and the label y.

    It is ``Z - l[y]``; label smoothing spreads a share of the label over the vocabulary, as in
    ``F.cross_entropy``; ``z_loss * Z**2`` is added (Chowdhery et al. 2022, section 5: 1e-4). ``logit_cap``:
    the logits are ``bounded`` first. A token whose label is ``ignore`` has no loss. ``compiled``: whether
    torch's compiler makes the kernels.
    """

    vocab_size: int
    smoothing: float = 0.0
    z_loss: float = 0.0
    ignore: int = IGNORE
    logit_cap: float | None = None
    compiled: bool = False

    def true_columns(self, columns: int, state: ParallelState) -> int:
        """Return how many of this rank's columns are not padding."""
        return min(max(self.vocab_size - state.tensor.index * columns, 0), columns)


class Rows(NamedTuple):
    """Hold the numbers that the gradient needs for each token, (N,) each.

    ``top``: the largest logit. ``total``: sum of ``exp(logit - top)``. ``target``: the label's column here,
    0 if it is ``elsewhere``. ``valid``: whether the token counts.
    """

    top: Tensor
    total: Tensor
    target: Tensor
    elsewhere: Tensor
    valid: Tensor


def token_losses(
    x_NV: Tensor, labels_N: Tensor, terms: LossTerms, state: ParallelState
) -> tuple[Tensor, Rows]:
    """Return the tokens' losses, (N,), and the ``Rows`` for their gradient, with two small all-reduces."""
    columns = terms.true_columns(x_NV.shape[-1], state)
    target = labels_N - state.tensor.index * x_NV.shape[-1]
    elsewhere = (target < 0) | (target >= columns)
    target = target.masked_fill(elsewhere, 0)
    top, total, spread = _sums(x_NV[:, :columns], terms)
    picked = _bounded(x_NV.gather(-1, target.unsqueeze(-1)), terms.logit_cap)[0].squeeze(-1)
    picked = picked.masked_fill(elsewhere, 0.0)
    if state.tensor.size > 1:
        rank_top, top = top, engine.all_reduce(top, state.tensor.group, "max")
        sums = torch.stack([total * (rank_top - top).exp(), picked, spread])
        total, picked, spread = engine.all_reduce(sums, state.tensor.group).unbind(0)
    log_total = total.log()
    # The differences come first: logits may be so large that a sum with them would lose the logarithm.
    loss = log_total + (1 - terms.smoothing) * (top - picked)
    if terms.smoothing:
        loss = loss + terms.smoothing * (top - spread / terms.vocab_size)
    if terms.z_loss:
        loss = loss + terms.z_loss * (top + log_total) ** 2
    valid = labels_N != terms.ignore
    return loss.masked_fill(~valid, 0.0), Rows(top, total, target, elsewhere, valid)


def logits_gradient(
    x_NV: Tensor, rows: Rows, grad: Tensor, terms: LossTerms, state: ParallelState, *, in_place: bool
) -> Tensor:
    """Return the gradient of the logits, in their dtype; ``grad``: that of the losses, (N,) or a scalar.

    ``in_place``: it overwrites the logits.
    """
    columns = terms.true_columns(x_NV.shape[-1], state)
    weight = (grad * rows.valid).to(rows.top.dtype)
    factor = weight / rows.total
    if terms.z_loss:
        factor = factor * (1 + 2 * terms.z_loss * (rows.top + rows.total.log()))
    target = rows.target.unsqueeze(-1)
    uniform = weight * (terms.smoothing / terms.vocab_size) if terms.smoothing else None
    # The label's own entry, rounded once; it is read before the logits are overwritten.
    hit = weight * (1 - terms.smoothing) + (0.0 if uniform is None else uniform)
    of_label = _gradient(x_NV.gather(-1, target), rows.top, factor, hit, terms.logit_cap, None)

    out = x_NV if in_place else torch.empty_like(x_NV)
    logits = None if in_place else x_NV[:, :columns]
    _in_blocks(_write_gradient, terms, out[:, :columns], logits, rows.top, factor, uniform)
    out[:, columns:] = 0.0
    if columns:
        corrected = torch.where(rows.elsewhere.unsqueeze(-1), out.gather(-1, target), of_label.to(out.dtype))
        if accelerator.is_host(out.device):  # where scatter_ converts a whole bf16 tensor to fp32 and back
            out.index_put_((torch.arange(len(out)), rows.target), corrected.squeeze(-1))
        else:
            out.scatter_(-1, target, corrected)
    return out


def _sums(x: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's largest logit, sum of ``exp(logit - top)``, and, to smooth, sum of the logits."""
    top, total, spread = (x.new_zeros(len(x), dtype=_inner(x)) for _ in range(3))
    if not x.shape[-1]:  # a rank that holds nothing but padding
        return torch.full_like(top, torch.finfo(top.dtype).min), total, spread
    _in_blocks(_row_sums, terms, x, top, total, spread if terms.smoothing else None)
    return top, total, spread


def _in_blocks(function: Callable[..., None], terms: LossTerms, *tensors: Tensor | None) -> None:
    """Call a function of the rows of some tensors for a block of rows at a time, or compiled for all."""
    if terms.compiled and not torch.compiler.is_compiling():
        _compiled(function)(*tensors, terms.logit_cap)
        return
    x = tensors[0]
    assert x is not None
    numbers = BLOCK_ON_CPU if accelerator.is_host(x.device) else _BLOCK
    count = max(numbers // max(x.shape[-1], 1), 1)
    for start in rounds(range(0, max(len(x), 1), count)):
        rows = (None if tensor is None else tensor[start : start + count] for tensor in tensors)
        function(*rows, terms.logit_cap)


def _row_sums(x: Tensor, top: Tensor, total: Tensor, spread: Tensor | None, cap: float | None) -> None:
    y, _ = _bounded(x, cap)
    torch.amax(y, -1, out=top)
    if spread is not None:
        torch.sum(y, -1, out=spread)
    torch.sum(_less(y, top, x, cap).exp_(), -1, out=total)


def _write_gradient(
    out: Tensor, x: Tensor | None, top: Tensor, factor: Tensor, uniform: Tensor | None, cap: float | None
) -> None:
    """Write the gradient of the logits ``x`` as if no token had a label; ``None``: they stand in ``out``."""
    into = None if torch.compiler.is_compiling() else out
    gradient = _gradient(out if x is None else x, top, factor, uniform, cap, into)
    if gradient is not into:
        out.copy_(gradient)


def _gradient(
    x: Tensor, top: Tensor, factor: Tensor, uniform: Tensor | None, cap: float | None, into: Tensor | None
) -> Tensor:
    """Return ``factor * exp(logit - top) - uniform`` of each logit, times the slope of its bound; if logits
    of this dtype are computed with as they are, in the memory ``into``.
    """
    y, share = _bounded(x, cap)
    gradient = _less(y, top, x, cap, into).exp_().mul_(factor.unsqueeze(-1))
    if uniform is not None:
        gradient -= uniform.unsqueeze(-1)
    return gradient if share is None else gradient.mul_(1 - share**2)


def _bounded(x: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return the logits in at least fp32, bounded by ``cap``, and their share of the bound."""
    y = x.to(_inner(x))
    if cap is None:
        return y, None
    share = (y / cap).tanh_()
    return share * cap, share


def _less(y: Tensor, top: Tensor, x: Tensor, cap: float | None, into: Tensor | None = None) -> Tensor:
    """Return ``y - top``, in the memory of ``y`` unless ``_bounded`` gave the logits ``x`` themselves."""
    if cap is None and y.dtype == x.dtype:
        return torch.sub(y, top.unsqueeze(-1), out=into)
    return y.sub_(top.unsqueeze(-1))


def _inner(x: Tensor) -> torch.dtype:
    """Return "fp32 inside", so that fp64 stays fp64."""
    return torch.promote_types(x.dtype, torch.float32)


@lru_cache(maxsize=16)
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return or_plain(function, torch.compile(function, fullgraph=True), "the loss")


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
    @differentiable_once("vocab_parallel_cross_entropy", "F.cross_entropy of gather_logits has them")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        # Logits that were overwritten cannot be unpacked again: autograd refuses a second backward.
        logits, *rows = ctx.saved_tensors
        flat, grad = logits.detach().flatten(0, -2), grads[0].flatten()
        gradient = logits_gradient(flat, Rows(*rows), grad, ctx.terms, ctx.state, in_place=ctx.overwrite)
        return gradient.view(logits.shape), None, None, None, None


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
    """Return each token's loss, (B, S), in at least fp32; it is zero where the label is ``ignore_index``.

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
    check_columns(logits.shape[-1], vocab_size, state, "logits")
    terms = LossTerms(vocab_size, label_smoothing, z_loss, ignore_index, compiled=compiled)
    losses: Tensor = _CrossEntropy.apply(logits, labels, terms, overwrite, state)
    return losses


def check_columns(columns: int, vocab_size: int, state: ParallelState, key: str) -> None:
    """Refuse another number of this rank's columns of logits than that of its part of the vocabulary."""
    size = state.tensor.size
    whole, padded = columns * size, padded_vocabulary(vocab_size, size)
    if whole < vocab_size or (size > 1 and whole not in (vocab_size, padded)):
        expected = (
            f"{padded // size} columns: a part of {vocab_size}" if size > 1 else f"at least {vocab_size}"
        )
        todo = "Do not gather the logits before it" if whole > padded else ""
        raise BadInput("cross entropy", key, expected=expected, found=columns, todo=todo)


def bounded(logits: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(logits / cap)``: smooth, and within plus or minus ``cap`` (Gemma 2, section 2)."""
    return (logits / cap).tanh() * cap


def valid_tokens(labels: Tensor, *, ignore_index: int = IGNORE) -> Tensor:
    """Return the number of labels that count, as a scalar int64 tensor."""
    return (labels != ignore_index).sum()
