"""Be one rank of any layout, on the simulated device, in this process alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from ..parallel_state import Layout, ParallelState
from ..parallel_state.state import fsdp_mesh
from .backend import NAME, start_group
from .device import SimulatedDevice
from .waits import Waits


class _Sending:
    """Hold what is sent as long as somebody holds the handle, as real process groups do."""

    def __init__(self, work: dist.Work, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def simulated_rank(
    layout: Layout, rank: int, waits: Waits, *, strict: bool = True
) -> Iterator[tuple[ParallelState, SimulatedDevice]]:
    """Yield the state of a rank on the device, and the device, entered. The other ranks are imagined:
    collectives give what they were given, and what is received has the right shape. ``strict``: see there.
    """
    new_group, all_reduce, isend = dist.new_group, dist.all_reduce, dist.isend

    def alike(*ranks: Any, backend: str | None = None, **named: Any) -> Any:
        return new_group(*ranks, **named)  # gloo would look for the other ranks

    def summed(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **named: Any) -> Any:
        handle = all_reduce(tensor, op, group, **named)
        if op == dist.ReduceOp.SUM and tensor.device.type == "cpu":
            tensor.mul_(dist.get_world_size(group))  # what ranks agree on looks at it
        return handle

    def sent(tensor: Tensor, *args: Any, **named: Any) -> Any:
        return None if (work := isend(tensor, *args, **named)) is None else _Sending(work, tensor)

    start_group(rank, layout.world)
    try:
        instead: dict[str, Any] = {"new_group": alike, "all_reduce": summed, "isend": sent}
        checks = mock.patch.object(dist.distributed_c10d, "isend", sent)  # by identity
        with mock.patch.multiple(dist, **instead), checks, SimulatedDevice(waits, strict=strict) as device:
            yield ParallelState.start(layout, device=NAME), device
    finally:
        dist.destroy_process_group()


def axes_of_groups(state: ParallelState) -> dict[str, str]:
    """Return the axis of each process group, as the planner calls it, by the group's name."""
    layout, mesh = state.layout, fsdp_mesh(state)
    groups: dict[str, dist.ProcessGroup | None] = {
        "all": dist.group.WORLD,
        "tensor": state.tensor.group,
        "pipeline": state.pipeline.group,
        "ends": state.ends.group if layout.pipeline > 1 else None,
        "context": state.context.group if layout.context > 1 else None,
        "data": mesh.get_group("fsdp"),
        "replicas": mesh.get_group("data_replicate") if layout.copies_shards else state.replica_group(),
    }
    if layout.expert > 1:
        stacks = fsdp_mesh(state, experts=True)
        shards = layout.copies_shards
        copies = stacks.get_group("expert_replicate") if shards else state.replica_group(experts=True)
        groups |= {"expert": state.expert.group, "expert data": stacks.get_group("expert_shard")}
        groups["expert replicas"] = copies
    # Axes of one rank share a group, over which nothing should be sent.
    return {
        group.group_name: axis for axis, group in groups.items() if group is not None and group.size() > 1
    }
