"""Let functions call the operators of a device that is not there: a GPU's one kernel, or a CPU's several.

What an operator keeps for its backward follows from its derivative, whatever the device. Only where torch
itself asks for the device, and takes a fused kernel on one and a composite on another, it must be told.

=============================  =====================================  ====================================
function                       on a GPU (torch 2.13)                  keeps for backward, beside its inputs
=============================  =====================================  ====================================
scaled_dot_product_attention   flash: 16 bits, no mask                output; logsumexp of a row, fp32
the same                       memory-efficient: fp32, or a mask      output; logsumexp of a row, fp32
rms_norm                       _fused_rms_norm (layer_norm.cpp)       a scale of a row, fp32
dropout                        native_dropout (Dropout.cpp)           a mask, one byte a number
=============================  =====================================  ====================================

The choice between the two kernels of attention is that of ``sdp_utils.cpp``, and that of a CPU's is
``use_flash_attention_cpp`` in ``sdp_utils_cpp.cpp``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..parallel_state.engine import accelerator

Kernels = Literal["gpu", "cpu"]
_aten = torch.ops.aten
_LIBRARY = torch.library.Library("aten", "IMPL")
#: What computes composite operators while it is entered; ``NotImplemented`` for what torch composes.
_ENTERED: list[Mapping[str, Callable[..., Any]]] = []


@contextmanager
def computing_as(kernels: Kernels, backend: str = "PrivateUse1") -> Iterator[None]:
    """Let tensors on torch's device of this name for it, by default the simulated one, be computed as a GPU's
    or a CPU's inside this context, in all threads, and where C++ calls operators.
    """
    _choose(f"Autograd{backend}")
    _ENTERED.append(_FUNCTIONS[kernels])
    try:
        yield
    finally:
        _ENTERED.pop()


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Let tensors on the "meta" device be computed as a GPU's inside this context, and layers choose so."""
    with accelerator.imagined(), computing_as("gpu", "Meta"):
        yield


@lru_cache(maxsize=8)
def _choose(key: str) -> None:
    """Let composite operators of a device be replaceable; for good."""
    for name in _FUNCTIONS["gpu"]:
        _LIBRARY.impl(name, _choice(name), key)


def _choice(name: str) -> Callable[..., Any]:
    composed = getattr(_aten, name).default

    def run(*args: Any, **kwargs: Any) -> Any:
        if _ENTERED and (instead := _ENTERED[-1].get(name)) is not None:
            out = instead(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return composed.decompose(*args, **kwargs)

    return run


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, p: float = 0.0, causal: bool = False, **named: Any
) -> Any:
    if q.dtype == torch.float64:  # which no kernel takes
        return NotImplemented
    scale = named.get("scale")
    if mask is None and q.dtype in (torch.bfloat16, torch.float16):
        return _aten._scaled_dot_product_flash_attention(q, k, v, p, causal, False, scale=scale)[0]
    if q.ndim == 4 and q.shape[1] != k.shape[1]:  # grouped queries: the memory-efficient kernel has none
        return NotImplemented
    if mask is not None:
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    sums = torch.is_grad_enabled()
    return _aten._scaled_dot_product_efficient_attention(q, k, v, mask, sums, p, causal, scale=scale)[0]


def _attention_of_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, p: float = 0.0, causal: bool = False, **named: Any
) -> Any:
    learned = mask is not None and mask.requires_grad
    if p or learned or q.shape[-1] != v.shape[-1] or q.ndim != 4:
        return NotImplemented
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, 0.0, causal, attn_mask=mask, scale=named.get("scale"))[0]


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


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if train and p else x


def _dropout_of_cpu(x: Tensor, p: float, train: bool) -> Any:
    """Multiply by a mask in the dtype of ``x``: only GPUs have a fused kernel, whose mask are bytes."""
    if p in (0, 1) or not train or not x.numel():
        return NotImplemented
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


_FUNCTIONS: dict[Kernels, dict[str, Callable[..., Any]]] = {
    "gpu": {"scaled_dot_product_attention": _attention, "rms_norm": _rms_norm, "dropout": _dropout},
    "cpu": {"scaled_dot_product_attention": _attention_of_cpu, "dropout": _dropout_of_cpu},
}
