"""Multiply by weights cut along their rows; in backward, send one gradient while others are computed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..parallel_state import ParallelState, engine
from ..parallel_state.engine.autograd_and_compiler import differentiates_again, wanted_gradients
from ..parallel_state.engine.collectives import all_reduce_start, reduce_scatter_start
from .autocast import autocasts
from .collectives import check_sequence, copy_to_tensor, enter_tensor, leave_tensor

#: Each product's weight and bias, as this rank computes with them.
WeightsAndBiases = Sequence[tuple[Tensor, Tensor | None]]
#: Returns ``x W^T + b`` for each weight and bias: ``products``, or float8.
Products = Callable[[Tensor, WeightsAndBiases], list[Tensor]]


def products(x: Tensor, weights_and_biases: WeightsAndBiases) -> list[Tensor]:
    """Return ``x W^T + b`` for each weight and bias, in the dtype of ``x``."""
    return [F.linear(x, weight, bias) for weight, bias in weights_and_biases]


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, state: ParallelState, *weights_and_biases: Tensor | None
    ) -> tuple[Tensor, ...]:
        whole = engine.all_gather(x, 1, state.tensor.group) if state.sequence else x
        pairs = [*zip(weights_and_biases[::2], weights_and_biases[1::2], strict=True)]
        ctx.state = state
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(whole, *weights_and_biases[::2])
        # Outputs that are no views may be changed in place, as by nn.ReLU(inplace=True).
        outputs = (F.linear(whole, weight, bias).detach() for weight, bias in pairs if weight is not None)
        # What is gathered is an output too: a gradient of gradients finds only those and inputs again.
        return (*outputs, whole) if state.sequence else (*outputs,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        state, (x, *weights) = ctx.state, ctx.saved_tensors
        needed, again = wanted_gradients(ctx), differentiates_again()
        coming: Callable[[], Tensor] | None = None
        outputs, dx = (grads[:-1], grads[-1]) if state.sequence else (grads, None)
        if needed[0]:
            for grad, weight in zip(reversed(outputs), reversed(weights), strict=True):  # autograd's order
                if grad is not None:  # no name holds a product while the next ones are computed
                    dx = grad @ weight if dx is None else _sum(dx, grad @ weight, in_place=not again)
            assert dx is not None
            if again:
                coming = partial(leave_tensor, dx, state)
            elif state.sequence:
                coming = reduce_scatter_start(dx, 1, state.tensor.group)
            else:
                coming = all_reduce_start(dx, state.tensor.group)
        gradients: list[Tensor | None] = []
        flat = (copy_to_tensor(x, state) if again and not state.sequence else x).flatten(0, -2)
        for number, grad in enumerate(outputs):
            rows = None if grad is None else grad.flatten(0, -2)
            gradients.append(rows.t() @ flat if rows is not None and needed[2 + 2 * number] else None)
            gradients.append(rows.sum(0) if rows is not None and needed[3 + 2 * number] else None)
        return None if coming is None else coming(), None, *gradients


def _sum(x: Tensor, y: Tensor, *, in_place: bool) -> Tensor:
    return x.add_(y) if in_place else x + y


def column_products(x: Tensor, weights_and_biases: WeightsAndBiases, state: ParallelState) -> list[Tensor]:
    """Return ``x W^T + b`` for each weight and bias, after ``enter_tensor``.

    In backward the gradient of ``x`` is summed over the tensor ranks while the gradients of the weights are
    computed. Inside an autocast region autograd does one after the other, because it must follow autocast's
    casts. Raises ``BadInput`` for an input without a sequence dim under sequence parallelism.
    """
    if state.tensor.size == 1 or autocasts(x):
        return products(enter_tensor(x, state), weights_and_biases)
    if state.sequence:
        check_sequence(x, state)
    outputs = _Products.apply(x, state, *(part for pair in weights_and_biases for part in pair))
    return [*outputs[: len(weights_and_biases)]]
