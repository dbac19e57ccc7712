"""Compute a function again in its backward, so that only its inputs are kept."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``function(*inputs)``, which backward computes again; the gradients are those of ``function``.

    A recurrence in chunks makes several times the bytes of its inputs. ``function`` must be a function of
    ``inputs`` alone, draw no random numbers, and may be collective. ``torch.compile`` traces it as it is.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(*inputs)
    return _recomputed(function, *inputs)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [
            tensor.detach().requires_grad_(need)
            for tensor, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            made = ctx.function(*inputs)
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        gradients = iter(torch.autograd.grad(made, wanted, grads[0]))
        return None, *(next(gradients) if need else None for need in needed)


# torch declares ``apply`` without types.
_recomputed: Callable[..., Tensor] = _Recomputed.apply
