"""Measure what devices can do, in products, attention, copies, small operators, and in collectives."""

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ...layers import Checkpointing
from ...parallel_state import Layout, ParallelState
from ...runs.launch import process_group
from ...system import counted
from ..facts import smi
from . import blocks
from .timing import Figures, median_seconds


def device_speed(device: str, side: int, megabytes: int, rounds: int) -> dict[str, Any]:
    """Measure products of square matrices of ``side`` rows, and copies of ``megabytes``, in this process.

    ``rounds``: of small blocks. Ranks of a CPU begin each measurement at the same moment, because they share
    its memory and its clock.
    """
    on, ranks = torch.device(device), int(os.environ["WORLD_SIZE"])
    work: dict[str, Callable[[], float]] = {
        "matmul, bf16: TFLOP/s": lambda: matmul_flops(on, side) / 1e12,
        "matmul, fp32: TFLOP/s": lambda: matmul_flops(on, side // 2, torch.float32) / 1e12,
        "attention, bf16: TFLOP/s": lambda: attention_flops(on, side // 2, torch.bfloat16) / 1e12,
        "attention, fp32: TFLOP/s": lambda: attention_flops(on, side // 2, torch.float32) / 1e12,
        "operator of one number: us": lambda: launch_seconds(on) * 1e6,
        "operator in a block: us": lambda: blocks.operator_seconds(on, rounds) * 1e6,
        "copy: GB/s read and written": lambda: copy_rate(on, megabytes) / 1e9,
    }
    if on.type == "cpu":  # a GPU works while the host goes on
        for mode in blocks.AGAIN:
            name = f"checkpointing {mode}, for an operator: us"
            work[name] = partial(lambda mode: blocks.added_by(on, rounds, mode) * 1e6, mode)
    if on.type == "cuda":
        work["host to device, pinned: GB/s"] = lambda: transfer_rate(on, megabytes) / 1e9
    if ranks == 1:
        return {"figures": {name: measure() for name, measure in work.items()}}
    figures: Figures = {}
    with process_group(Layout.of(data=ranks), device=device):
        for name, measure in work.items():
            dist.barrier()
            figures[name] = measure()
        dist.barrier()  # or a rank that has finished would leave the others the whole machine
    threads = torch.get_num_threads()
    return {
        "figures": figures,
        "note": f"{counted(ranks, 'rank')} at once, each with {counted(threads, 'thread')}",
    }


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
    number = torch.ones(1, device=device)

    def work() -> None:
        for _ in range(count):
            number.add(number)

    return median_seconds(work, device, rounds=5) / count


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


def collective_speed(device: str, megabytes: int, rounds: int) -> dict[str, Any]:
    """Time collectives of ``megabytes`` in all, of 4 KiB, and on a CPU those inside a step; collective.

    A rate is the bus bandwidth of NCCL's own tests: the bytes that each rank sends, by the seconds.
    """
    world = int(os.environ["WORLD_SIZE"])
    figures: Figures = {}
    with process_group(Layout.of(tensor=world), device=device) as state:
        on = state.device
        whole = torch.ones((megabytes << 20) // 4 // world * world, device=on)
        part = whole[: whole.numel() // world].clone()
        share = (world - 1) / world
        sent: dict[str, tuple[Callable[[], object], float]] = {
            "all-reduce": (lambda: dist.all_reduce(whole), 2 * share),
            "all-gather": (lambda: dist.all_gather_into_tensor(whole, part), share),
            "reduce-scatter": (lambda: dist.reduce_scatter_tensor(part, whole), share),
        }
        for name, (work, factor) in sent.items():
            figures[f"{name}: GB/s"] = factor * whole.nbytes / median_seconds(work, on, rounds=10) / 1e9
        small = torch.ones(1024, device=on)
        alone = median_seconds(lambda: dist.all_reduce(small), on, rounds=50)
        figures["all-reduce of 4 KiB: us"] = alone * 1e6
        if device == "cpu":
            ring = ParallelState.start(Layout.of(context=world, ring=True), device=device)
            modes: tuple[Checkpointing, ...] = ("none", *blocks.AGAIN)
            alone_in = {mode: blocks.block_seconds(on, rounds, mode) for mode in modes}
            for name, ranks in (("collective in a block", state), ("exchange around a ring", ring)):
                for mode, block in alone_in.items():
                    seconds = blocks.collective_seconds(ranks, rounds, mode, alone=block)
                    figures[f"{name}, checkpointing {mode}: us"] = seconds * 1e6
            figures |= blocks.exchange_figures(world, figures, rounds)
    link = link_rate(smi("nvlink", "-s", "-i", "0")) if device == "cuda" else 0.0
    if link:
        figures["NVLink, one direction: GB/s"] = link
        figures["all-reduce, of the link"] = float(figures["all-reduce: GB/s"] or 0.0) / link
    return {"figures": figures, "note": f"{counted(world, 'rank')}, {megabytes} MiB in fp32; bus bandwidth"}


def link_rate(text: str) -> float:
    """Return the sum of a GPU's links in GB/s, from the text of ``nvidia-smi nvlink -s``; 0 if none."""
    return sum(float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", text))
