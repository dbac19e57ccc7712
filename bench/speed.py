"""Measure what the device itself can do: matrix products, attention, copies of memory, small operators."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..models import family_of
from ..parallel_state import initialize
from ..planner.time.kernels import leaves
from .row import Figures
from .timing import median_seconds


def device_speed(device: str, side: int, megabytes: int) -> dict[str, Figures]:
    """Measure products of square matrices of ``side`` rows, and copies of ``megabytes``, in this process."""
    here = torch.device(device)
    figures: Figures = {"matmul, bf16: TFLOP/s": matmul_flops(here, side) / 1e12}
    figures["matmul, fp32: TFLOP/s"] = matmul_flops(here, side // 2, torch.float32) / 1e12
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        figures[f"attention, {name}: TFLOP/s"] = attention_flops(here, side // 2, dtype) / 1e12
    figures["operator of one number: us"] = launch_seconds(here) * 1e6
    figures["module, forward and backward: us"] = module_seconds(here) * 1e6
    figures["copy: GB/s read and written"] = copy_rate(here, megabytes) / 1e9
    if here.type == "cuda":
        figures["host to device, pinned: GB/s"] = transfer_rate(here, megabytes) / 1e9
    return {"figures": figures}


def matmul_flops(device: torch.device, side: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the FLOP/s of the product of two square matrices; a multiply-add counts as two."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / median_seconds(lambda: a @ b, device, rounds=10)


def attention_flops(device: torch.device, length: int, dtype: torch.dtype) -> float:
    """Return the FLOP/s of causal attention, forward and backward, over one row with 8 heads of 64.

    Half of the scores are computed, in two products forward and five backward.
    """
    shape = (1, 8, length, 64)
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))

    def work() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out.sum(), (q, k, v))

    return 7 * 8 * 64 * length**2 / median_seconds(work, device, rounds=5)


def launch_seconds(device: torch.device, count: int = 1000) -> float:
    """Return the seconds of an operator that has next to nothing to compute: what it takes to start one."""
    one = torch.ones(1, device=device)

    def work() -> None:
        for _ in range(count):
            one.add(one)

    return median_seconds(work, device, rounds=5) / count


def module_seconds(device: torch.device) -> float:
    """Return the seconds of a module of a block, forward and backward, that has next to nothing to compute.

    A module starts some operators, with Python and autograd between them. The figure is the mean over the
    modules of Llama's block: the difference between a model of 10 blocks and one of 2.
    """
    (few, some), (many, more) = (_pass_seconds(blocks, device) for blocks in (2, 10))
    return (many - few) / (more - some)


def _pass_seconds(blocks: int, device: torch.device) -> tuple[float, int]:
    """Time forward and backward of a Llama 16 wide, over 8 tokens; return the number of modules, too."""
    raw = {
        "model_type": "llama", "vocab_size": 16, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": blocks, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    family = family_of(raw)
    model = family.build(family.from_hf(raw), device=device)
    initialize(model, seed=0)
    ids = torch.zeros(1, 8, dtype=torch.int64, device=device)
    return median_seconds(lambda: model(ids).sum().backward(), device, rounds=10), leaves(model)


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
