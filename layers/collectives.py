"""Define collective pairs, which change an activation between whole, split and partial on the tensor axis.

Each pair is a forward and the backward that is its transpose:

==================  ==================  ==================  =================================
pair                forward             backward            Megatron's name
==================  ==================  ==================  =================================
copy_to_tensor      identity            all-reduce          f, copy_to_region
reduce_from_tensor  all-reduce          identity            g, reduce_from_region
split_to_tensor     keep own piece      all-gather          scatter_to_region
gather_from_tensor  all-gather          keep own piece      gather_from_region
gather_sequence     all-gather          reduce-scatter      gather_from_sequence_region
scatter_sequence    reduce-scatter      all-gather          reduce_scatter_to_sequence_region
==================  ==================  ==================  =================================

A "whole" activation is equal on every rank, and so is its gradient. A "split" activation is cut into one
piece for each rank. A "partial" activation is a term on each rank, and the value is their sum. On one tensor
rank each pair is the identity. Sources: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..parallel_state import BadInput, ParallelState, engine
from ..parallel_state.engine.autograd_and_compiler import differentiates_again
from ..parallel_state.state import Axis


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if differentiates_again():
            return _Pair.apply(grads[0], ctx.back, ctx.there), None, None
        return ctx.back(grads[0]), None, None


def pair(
    x: Tensor, axis: Axis, there: Callable[..., Tensor], back: Callable[..., Tensor], **along: Any
) -> Tensor:
    """Return ``there(x, group=..., **along)`` of the ranks along an axis; its gradient is ``back`` of the
    output's. On one rank it is ``x``.
    """
    if axis.size == 1:
        return x
    forward, backward = (partial(change, group=axis.group, **along) for change in (there, back))
    changed: Tensor = _Pair.apply(x, forward, backward)
    return changed


def copy_to_tensor(x: Tensor, state: ParallelState) -> Tensor:
    """Return a whole activation unchanged; in backward sum the ranks' partial gradients."""
    return pair(x, state.tensor, _alias, engine.all_reduce)


def reduce_from_tensor(x: Tensor, state: ParallelState) -> Tensor:
    """Sum a partial activation over the tensor ranks."""
    return pair(x, state.tensor, engine.all_reduce, _same)


def split_to_tensor(x: Tensor, state: ParallelState, *, dim: int = -1) -> Tensor:
    """Return this rank's equal piece of a whole activation along ``dim``."""
    return pair(x, state.tensor, own_piece, engine.all_gather, dim=dim % x.ndim)


def gather_from_tensor(x: Tensor, state: ParallelState, *, dim: int = -1) -> Tensor:
    """Gather an activation that is split along ``dim``; all ranks must use the result in the same way."""
    return pair(x, state.tensor, engine.all_gather, own_piece, dim=dim % x.ndim)


def gather_sequence(x: Tensor, state: ParallelState) -> Tensor:
    """Gather (B, S, ...) along its sequence; ranks may use it differently: gradients are summed."""
    check_sequence(x, state)
    return pair(x, state.tensor, engine.all_gather, engine.reduce_scatter, dim=1)


def scatter_sequence(x: Tensor, state: ParallelState) -> Tensor:
    """Sum a partial (B, S, ...) over the tensor ranks, and return this rank's piece of the sequence."""
    check_sequence(x, state)
    _check_divides(x, 1, state.tensor.size)
    return pair(x, state.tensor, _reduce_scatter, engine.all_gather, dim=1)


def enter_tensor(x: Tensor, state: ParallelState) -> Tensor:
    """Make an activation from between the blocks whole, as the input of one or more column-parallel products.

    With sequence parallelism it is gathered along the sequence; without, its gradient is all-reduced.
    """
    return gather_sequence(x, state) if state.sequence else copy_to_tensor(x, state)


def leave_tensor(x: Tensor, state: ParallelState) -> Tensor:
    """Sum the partial output of a row-parallel product; with sequence parallelism keep this rank's tokens."""
    return scatter_sequence(x, state) if state.sequence else reduce_from_tensor(x, state)


def own_piece(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's equal piece of ``dim``, contiguous. Its gradient is autograd's."""
    size = group.size()
    _check_divides(x, dim, size)
    length = x.shape[dim] // size
    return x.narrow(dim, group.rank() * length, length).contiguous()


def check_sequence(x: Tensor, state: ParallelState) -> None:
    """Refuse an input without a sequence dim for several ranks: another dim would be cut in its place."""
    if x.ndim < 3 and state.tensor.size > 1:
        expected, shape = "(batch, sequence, features)", f"shape {[*x.shape]}"
        todo = "Give it all three dims (x.unsqueeze(0)), or take a layout without sequence=True"
        raise BadInput("sequence parallelism", "input", expected=expected, found=shape, todo=todo)


def _check_divides(x: Tensor, dim: int, size: int) -> None:
    if x.shape[dim] % size:
        place = f"dim {dim} of shape {[*x.shape]}"
        expected = f"a length that tensor={size} divides"
        todo = "Change the sequence length or the tensor axis"
        raise BadInput("input", place, expected=expected, found=x.shape[dim], todo=todo)


def _reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return no view: what a row-parallel layer gives may then be changed in place (``y += x``)."""
    return engine.reduce_scatter(x, dim, group).detach()


def _alias(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _same(x: Tensor, group: ProcessGroup) -> Tensor:
    return x
