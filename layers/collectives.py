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
rank each pair is the identity and launches nothing. Source: Shoeybi et al. 2019 (section 3), Korthikanti et
al. 2022 (section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..parallel_state import BadInput, ParallelState, engine


class _CopyToTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: ParallelState) -> Tensor:
        ctx.state = state
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return engine.all_reduce(grads[0], ctx.state.tensor_group), None


class _ReduceFromTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: ParallelState) -> Tensor:
        return engine.all_reduce(x, state.tensor_group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, state: ParallelState) -> Tensor:
        ctx.dim, ctx.state = dim, state
        return own_piece(x, dim, state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return engine.all_gather(grads[0], ctx.dim, ctx.state.tensor_group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, state: ParallelState) -> Tensor:
        ctx.dim, ctx.state = dim, state
        return engine.all_gather(x, dim, state.tensor_group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return own_piece(grads[0], ctx.dim, ctx.state), None, None


class _GatherPartialGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, state: ParallelState) -> Tensor:
        ctx.dim, ctx.state = dim, state
        return engine.all_gather(x, dim, state.tensor_group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return engine.reduce_scatter(grads[0], ctx.dim, ctx.state.tensor_group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, state: ParallelState) -> Tensor:
        ctx.dim, ctx.state = dim, state
        return engine.reduce_scatter(x, dim, state.tensor_group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return engine.all_gather(grads[0], ctx.dim, ctx.state.tensor_group), None, None


# torch declares ``apply`` without types.
_copy: Callable[..., Tensor] = _CopyToTensor.apply
_reduce: Callable[..., Tensor] = _ReduceFromTensor.apply
_split: Callable[..., Tensor] = _Split.apply
_gather: Callable[..., Tensor] = _Gather.apply
_gather_sequence: Callable[..., Tensor] = _GatherPartialGrad.apply
_scatter_sequence: Callable[..., Tensor] = _ReduceScatter.apply


def copy_to_tensor(x: Tensor, state: ParallelState) -> Tensor:
    """Return a whole activation unchanged; in backward sum the ranks' partial gradients."""
    return x if state.tensor_size == 1 else _copy(x, state)


def reduce_from_tensor(x: Tensor, state: ParallelState) -> Tensor:
    """Sum a partial activation over the tensor ranks."""
    return x if state.tensor_size == 1 else _reduce(x, state)


def split_to_tensor(x: Tensor, state: ParallelState, *, dim: int = -1) -> Tensor:
    """Return this rank's equal piece of a whole activation along ``dim``."""
    if state.tensor_size == 1:
        return x
    return _split(x, _positive(x, dim), state)


def gather_from_tensor(x: Tensor, state: ParallelState, *, dim: int = -1) -> Tensor:
    """Gather an activation that is split along ``dim``; all ranks must use the result in the same way."""
    if state.tensor_size == 1:
        return x
    return _gather(x, _positive(x, dim), state)


def gather_sequence(x: Tensor, state: ParallelState, *, dim: int = 1) -> Tensor:
    """Gather an activation that is split along the sequence; ranks may use it differently, so gradients
    are summed.
    """
    if state.tensor_size == 1:
        return x
    check_sequence(x, dim)
    return _gather_sequence(x, _positive(x, dim), state)


def scatter_sequence(x: Tensor, state: ParallelState, *, dim: int = 1) -> Tensor:
    """Sum a partial activation over the tensor ranks, and return this rank's piece of the sequence."""
    if state.tensor_size == 1:
        return x
    check_sequence(x, dim)
    _check_divides(x, dim, state)
    return _scatter_sequence(x, _positive(x, dim), state)


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
    length = x.shape[dim] // state.tensor_size
    return x.narrow(dim, state.tensor_index * length, length).contiguous()


def check_sequence(x: Tensor, dim: int) -> None:
    """Refuse an input without a sequence dim: another dim would be cut in its place."""
    if x.ndim <= dim + 1:
        raise BadInput(
            "sequence parallelism",
            "input",
            expected="(batch, sequence, features)",
            found=f"shape {tuple(x.shape)}",
            todo="Give it all three dims (x.unsqueeze(0)), or take a layout without sequence=True",
        )


def _check_divides(x: Tensor, dim: int, state: ParallelState) -> None:
    if x.shape[dim] % state.tensor_size:
        raise BadInput(
            "input",
            f"dim {dim} of shape {tuple(x.shape)}",
            expected=f"a length that tensor={state.tensor_size} divides",
            found=x.shape[dim],
            todo="Change the sequence length or the tensor axis",
        )


def _positive(x: Tensor, dim: int) -> int:
    return dim % x.ndim
