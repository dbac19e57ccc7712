"""Be one rank of any layout, on the simulated device, in this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from ..parallel_state import Layout, ParallelState
from .backend import NAME, start_group
from .device import SimulatedDevice, Waits


@contextmanager
def simulated_rank(
    layout: Layout, rank: int, waits: Waits
) -> Iterator[tuple[ParallelState, SimulatedDevice]]:
    """Yield the state of a rank on the device, and the device, entered. The other ranks are imagined:
    collectives give what they were given, and what is received has the right shape.
    """
    new_group, all_reduce = dist.new_group, dist.all_reduce

    def alike(*ranks: Any, backend: str | None = None, **named: Any) -> Any:
        return new_group(*ranks, **named)  # gloo would look for the other ranks

    def summed(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **named: Any) -> Any:
        done = all_reduce(tensor, op, group, **named)
        if op == dist.ReduceOp.SUM and tensor.device.type == "cpu":
            tensor.mul_(dist.get_world_size(group))  # what ranks agree on looks at it
        return done

    start_group(rank, layout.world)
    try:
        with mock.patch.multiple(dist, new_group=alike, all_reduce=summed), SimulatedDevice(waits) as device:
            yield ParallelState.start(layout, device=NAME), device
    finally:
        dist.destroy_process_group()
