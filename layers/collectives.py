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

from ..parallel_state import BadInput, ParallelState, engine

_Change = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Change, back: _Change) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


#: Returns ``there(x)``, whose gradient is ``back`` of the output's. torch declares ``apply`` without types.
pair: Callable[[Tensor, _Change, _Change], Tensor] = _Pair.apply


def copy_to_tensor(x: Tensor, state: ParallelState) -> Tensor:
    """Return a whole activation unchanged; in backward sum the ranks' partial gradients."""
    if state.tensor.size == 1:
        return x
    return pair(x, _alias, partial(engine.all_reduce, group=state.tensor.group))


def reduce_from_tensor(x: Tensor, state: ParallelState) -> Tensor:
    """Sum a partial activation over the tensor ranks."""
    if state.tensor.size == 1:
        return x
    return pair(x, partial(engine.all_reduce, group=state.tensor.group), _same)


def split_to_tensor(x: Tensor, state: ParallelState, *, dim: int = -1) -> Tensor:
    """Return this rank's equal piece of a whole activation along ``dim``."""
    if state.tensor.size == 1:
        return x
    dim %= x.ndim
    gather = partial(engine.all_gather, dim=dim, group=state.tensor.group)
    return pair(x, partial(own_piece, dim=dim, state=state), gather)


def gather_from_tensor(x: Tensor, state: ParallelState, *, dim: int = -1) -> Tensor:
    """Gather an activation that is split along ``dim``; all ranks must use the result in the same way."""
    if state.tensor.size == 1:
        return x
    dim %= x.ndim
    gather = partial(engine.all_gather, dim=dim, group=state.tensor.group)
    return pair(x, gather, partial(own_piece, dim=dim, state=state))


def gather_sequence(x: Tensor, state: ParallelState) -> Tensor:
    """Gather (B, S, ...) along its sequence; ranks may use it differently: gradients are summed."""
    if state.tensor.size == 1:
        return x
    check_sequence(x)
    return pair(x, *_gather_and_scatter(state))


def scatter_sequence(x: Tensor, state: ParallelState) -> Tensor:
    """Sum a partial (B, S, ...) over the tensor ranks, and return this rank's piece of the sequence."""
    if state.tensor.size == 1:
        return x
    check_sequence(x)
    _check_divides(x, 1, state)
    return pair(x, *reversed(_gather_and_scatter(state)))


def enter_tensor(x: Tensor, state: ParallelState) -> Tensor:
    """Make an activation from between the blocks whole, as the input of one or more column-parallel products.

    With sequence parallelism it is gathered along the sequence; without, its gradient is all-reduced.
    """
    return gather_sequence(x, state) if state.sequence else copy_to_tensor(x, state)


def leave_tensor(x: Tensor, state: ParallelState) -> Tensor:
    """Sum the partial output of a row-parallel product; with sequence parallelism keep this rank's tokens."""
    return scatter_sequence(x, state) if state.sequence else reduce_from_tensor(x, state)


def own_piece(x: Tensor, dim: int, state: ParallelState) -> Tensor:
    """Return this tensor rank's equal piece of ``dim``, contiguous. Its gradient is autograd's."""
    _check_divides(x, dim, state)
    length = x.shape[dim] // state.tensor.size
    return x.narrow(dim, state.tensor.index * length, length).contiguous()


def check_sequence(x: Tensor) -> None:
    """Refuse an input without a sequence dim: another dim would be cut in its place."""
    if x.ndim < 3:
        expected, shape = "(batch, sequence, features)", f"shape {[*x.shape]}"
        todo = "Give it all three dims (x.unsqueeze(0)), or take a layout without sequence=True"
        raise BadInput("sequence parallelism", "input", expected=expected, found=shape, todo=todo)


def _check_divides(x: Tensor, dim: int, state: ParallelState) -> None:
    if x.shape[dim] % state.tensor.size:
        place = f"dim {dim} of shape {[*x.shape]}"
        expected = f"a length that tensor={state.tensor.size} divides"
        todo = "Change the sequence length or the tensor axis"
        raise BadInput("input", place, expected=expected, found=x.shape[dim], todo=todo)


def _gather_and_scatter(state: ParallelState) -> tuple[_Change, _Change]:
    along: dict[str, Any] = {"dim": 1, "group": state.tensor.group}
    return partial(engine.all_gather, **along), partial(engine.reduce_scatter, **along)


def _alias(x: Tensor) -> Tensor:
    return x.view_as(x)


def _same(x: Tensor) -> Tensor:
    return x
