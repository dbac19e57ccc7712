"""Call kernels that have no public name in torch: fused attention with its log-sums, float8 products."""

from typing import cast

import torch
from torch import Tensor

from .accelerator import has_flash_attention, is_host


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute fused attention, (B, H, S, E) in q's dtype, and its log-sums, (B, H, S) in at least fp32.

    ``F.scaled_dot_product_attention`` does not return the log-sums. All three inputs have as many heads.
    """
    if has_flash_attention(q.device):
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    else:
        outputs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    return outputs[0], outputs[1]


def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    ``out`` and ``log_sums`` may be over more keys than ``k`` holds: the gradients are then these keys' part.
    """
    log_sums = log_sums.contiguous()
    if has_flash_attention(q.device):
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
        parts = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, log_sums, None, None, q.shape[2], k.shape[2], 0.0, causal, random, random),
            scale=scale,
        )
    else:
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, log_sums, 0.0, causal, scale=scale
        )
    return cast(tuple[Tensor, Tensor, Tensor], tuple(parts))


def scaled_mm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Multiply float8 matrices, (M, K) in rows and (K, N) in columns, times their scales, in fp32 or better.

    Scales: fp32, of one element each, or (M, 1) and (1, N). ``dtype``: of the product. ``fast``: whether GPUs
    may keep fewer digits of the sums.
    """
    if is_host(left.device) and dtype == torch.float64:  # which oneDNN refuses on some machines
        return (left.to(dtype) @ right.to(dtype)) * left_scale.to(dtype) * right_scale.to(dtype)
    if is_host(left.device) and left_scale.numel() > 1:  # before torch 2.12 only one scale a tensor
        unit_scale = left_scale.new_ones(())
        product = torch._scaled_mm(left, right, unit_scale, unit_scale, out_dtype=dtype)
        return product * left_scale.to(dtype) * right_scale.to(dtype)
    return torch._scaled_mm(left, right, left_scale, right_scale, out_dtype=dtype, use_fast_accum=fast)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Stop the device, and with it this rank, once it finds that ``condition`` is false; the host goes on."""
    torch._assert_async(condition, message)
