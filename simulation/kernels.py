"""Call the operators of a GPU without one, where a GPU has one kernel and other devices several.

What an operator keeps for its backward follows from its derivative, whatever the device. Only where torch
itself asks for the device, and takes a fused kernel on a GPU and a composite on a CPU, a trace must be told.

=============================  =====================================  ====================================
function                       on a GPU (torch 2.13)                  keeps for backward, beside its inputs
=============================  =====================================  ====================================
scaled_dot_product_attention   flash: 16 bits, no mask                output; logsumexp of a row, fp32
the same                       memory-efficient: fp32, or a mask      output; logsumexp of a row, fp32
rms_norm                       _fused_rms_norm (layer_norm.cpp)       a scale of a row, fp32
dropout                        native_dropout (Dropout.cpp)           a mask, one byte a number
=============================  =====================================  ====================================

The choice between the two kernels of attention is that of ``sdp_utils.cpp``.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from ..parallel_state.engine import accelerator

_aten = torch.ops.aten


_plain_attention = F.scaled_dot_product_attention


@contextmanager
def fused_functions() -> Iterator[None]:
    """Let torch's functions call a GPU's fused kernels inside this context, in all threads."""
    with ExitStack() as stack:
        for function, kernel in _KERNELS.items():
            stack.enter_context(mock.patch.object(*function, kernel))
        yield


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Let tensors on the "meta" device be computed as a GPU's inside this context, and layers choose so."""
    with accelerator.imagined(), fused_functions():
        yield


def _attention(
    q_BHSE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if q_BHSE.dtype == torch.float64:  # which no kernel takes
        return _plain_attention(
            q_BHSE, k_BKTE, v_BKTE, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is None and q_BHSE.dtype in (torch.bfloat16, torch.float16):
        out, *_ = _aten._scaled_dot_product_flash_attention(
            q_BHSE, k_BKTE, v_BKTE, dropout_p, is_causal, False, scale=scale
        )
    else:
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*q_BHSE.shape[:-1], k_BKTE.shape[-2])
        out, *_ = _aten._scaled_dot_product_efficient_attention(
            q_BHSE, k_BKTE, v_BKTE, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
    return cast(Tensor, out)


class _FusedRmsNorm(torch.autograd.Function):
    """Keep what the fused kernel keeps. Off a GPU torch takes its composite, also for the kernel's own name,
    so one product of the same tensors stands for the kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        inner = torch.promote_types(x.dtype, torch.float32)
        scale = x.new_empty((*x.shape[:-1], 1), dtype=inner)
        ctx.save_for_backward(x, weight, scale)
        return x * (1 if weight is None else weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        of_weight = torch.empty_like(weight) if needs_weight else None
        return grads[0] * x if needs_x else None, of_weight


def _rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return cast(Tensor, _FusedRmsNorm.apply(x, weight))


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


_KERNELS: dict[tuple[Any, str], Callable[..., Tensor]] = {
    (F, "scaled_dot_product_attention"): _attention,
    (F, "rms_norm"): _rms_norm,
    (torch, "rms_norm"): _rms_norm,
    (F, "dropout"): _dropout,
}
