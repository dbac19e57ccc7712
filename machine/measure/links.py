"""Measure collectives between all ranks of the node, and compare them with the link's stated rate."""

import os
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...layers import Checkpointing
from ...parallel_state import Layout, ParallelState
from ...runs.launch import process_group
from ...system import counted
from ..facts import smi
from .groups_of_parameters import exchange_figures
from .row import Figures
from .small_blocks import AGAIN, block_seconds, collective_seconds
from .timing import median_seconds


def collective_speed(device: str, megabytes: int, rounds: int) -> dict[str, Any]:
    """Time collectives of ``megabytes`` in all, of 4 KiB, and on a CPU those inside a step; collective.

    A rate is the bus bandwidth of NCCL's own tests: the bytes that each rank sends, by the seconds.
    """
    world = int(os.environ["WORLD_SIZE"])
    figures: Figures = {}
    with process_group(Layout.of(tensor=world), device=device) as state:
        here = state.device
        whole = torch.ones((megabytes << 20) // 4 // world * world, device=here)
        part = whole[: whole.numel() // world].clone()
        share = (world - 1) / world
        sent: dict[str, tuple[Callable[[], object], float]] = {
            "all-reduce": (lambda: dist.all_reduce(whole), 2 * share),
            "all-gather": (lambda: dist.all_gather_into_tensor(whole, part), share),
            "reduce-scatter": (lambda: dist.reduce_scatter_tensor(part, whole), share),
        }
        for name, (work, factor) in sent.items():
            figures[f"{name}: GB/s"] = factor * whole.nbytes / median_seconds(work, here, rounds=10) / 1e9
        small = torch.ones(1024, device=here)
        alone = median_seconds(lambda: dist.all_reduce(small), here, rounds=50)
        figures["all-reduce of 4 KiB: us"] = alone * 1e6
        if device == "cpu":
            ring = ParallelState.start(Layout.of(context=world, ring=True), device=device)
            modes: tuple[Checkpointing, ...] = ("none", *AGAIN)
            alone_in = {mode: block_seconds(here, rounds, mode) for mode in modes}
            for name, ranks in (("collective in a block", state), ("exchange around a ring", ring)):
                for mode, block in alone_in.items():
                    seconds = collective_seconds(ranks, rounds, mode, alone=block)
                    figures[f"{name}, checkpointing {mode}: us"] = seconds * 1e6
            figures |= exchange_figures(world, figures, rounds)
    link = link_rate(smi("nvlink", "-s", "-i", "0")) if device == "cuda" else 0.0
    if link:
        figures["NVLink, one direction: GB/s"] = link
        figures["all-reduce, of the link"] = float(figures["all-reduce: GB/s"] or 0.0) / link
    return {"figures": figures, "note": f"{counted(world, 'rank')}, {megabytes} MiB in fp32; bus bandwidth"}


def link_rate(text: str) -> float:
    """Return the sum of a GPU's links in GB/s, from the text of ``nvidia-smi nvlink -s``; 0 if none."""
    return sum(float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", text))
