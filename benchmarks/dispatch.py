"""Measure the time that a parallel layer, and DTensor, add to a `torch.nn` layer on one tensor rank.

Measured are the main thread's own seconds on the processor, for a forward and backward of a few tokens 16
wide, so that only the time between operators shows. Contenders take turns in many short rounds; the median of
their differences counts.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from measure import Row, at_most, seconds_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trilith.layers import (
    ColumnParallelLinear,
    Dropout,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from trilith.machine.measure.layers import Mlp, forward_and_backward
from trilith.machine.measure.timing import in_pairs

WIDTH, CALLS, ROUNDS = 16, 50, 60


def plain() -> Mlp:
    return Mlp(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))


def main(folder: Path, rounds: int) -> list[Row]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return measured(rounds)
    finally:
        dist.destroy_process_group()


def measured(rounds: int) -> list[Row]:
    ours = Mlp(ColumnParallelLinear(WIDTH, 4 * WIDTH), RowParallelLinear(4 * WIDTH, WIDTH))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    dtensor = parallelize_module(plain(), init_device_mesh("cpu", (1,)), plan)
    x, ids = torch.randn(2, 4, WIDTH, requires_grad=True), torch.randint(100, (2, 4))
    return [
        added("an MLP of two linears", ours, plain(), x, rounds, goal=10),
        added("the same with DTensor's parallelize_module", dtensor, plain(), x, rounds),
        added("column-parallel linear", ColumnParallelLinear(16, 16), nn.Linear(16, 16), x, rounds, goal=5),
        added("row-parallel linear", RowParallelLinear(16, 16), nn.Linear(16, 16), x, rounds, goal=5),
        added("RMSNorm", RMSNorm(16), nn.RMSNorm(16, 1e-6), x, rounds, goal=5),
        added("LayerNorm", LayerNorm(16), nn.LayerNorm(16), x, rounds, goal=5),
        added("dropout", Dropout(0.1), nn.Dropout(0.1), x, rounds, goal=5),
        added("embedding", VocabParallelEmbedding(100, 16), nn.Embedding(100, 16), ids, rounds, goal=5),
    ]


def added(
    name: str, ours: nn.Module, theirs: nn.Module, x: Tensor, rounds: int, *, goal: float | None = None
) -> Row:
    """Measure the microseconds a call, forward and backward, that ``ours`` takes more than ``theirs``."""

    def microseconds(module: nn.Module) -> float:
        work = partial(forward_and_backward, module, x)
        seconds = seconds_of(lambda: [work() for _ in range(CALLS)], clock=time.thread_time)
        return seconds / CALLS * 1e6

    pairs = in_pairs(partial(microseconds, ours), partial(microseconds, theirs), rounds=rounds * ROUNDS // 5)
    row = at_most(name, [a - b for a, b in pairs], goal, "us")
    row.low, _, row.high = statistics.quantiles((a - b for a, b in pairs), n=4)
    row.details = {"torch.nn's, us": statistics.median(b for _, b in pairs)}
    return row
