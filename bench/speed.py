"""Measure what the device itself can do: matrix products in bf16, and copies of memory."""

from __future__ import annotations

import torch

from .row import Figures
from .timing import median_seconds


def device_speed(device: str, side: int, megabytes: int) -> dict[str, Figures]:
    """Measure products of square matrices of ``side`` rows, and copies of ``megabytes``, in this process."""
    here = torch.device(device)
    figures: Figures = {"matmul, bf16: TFLOP/s": matmul_flops(here, side) / 1e12}
    figures["matmul, fp32: TFLOP/s"] = matmul_flops(here, side // 2, torch.float32) / 1e12
    figures["copy: GB/s read and written"] = copy_rate(here, megabytes) / 1e9
    if here.type == "cuda":
        figures["host to device, pinned: GB/s"] = transfer_rate(here, megabytes) / 1e9
    return {"figures": figures}


def matmul_flops(device: torch.device, side: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the FLOP/s of the product of two square matrices; a multiply-add counts as two."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / median_seconds(lambda: a @ b, device, rounds=10)


def copy_rate(device: torch.device, megabytes: int) -> float:
    """Return bytes read and written in a second, by a copy within the device's memory."""
    source = torch.ones(megabytes << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device, rounds=10)


def transfer_rate(device: torch.device, megabytes: int) -> float:
    """Return bytes a second from the host's pinned memory to the device."""
    source = torch.ones(megabytes << 20, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=device)
    return source.nbytes / median_seconds(lambda: target.copy_(source, non_blocking=True), device, rounds=5)
