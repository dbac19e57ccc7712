"""Know a collective among the operators that run, and the axis of the layout over which it sends."""

from functools import lru_cache
from typing import Any

import torch.distributed as dist

from ..parallel_state import ParallelState
from ..parallel_state.state import fsdp_mesh

#: The kinds of collectives, by the operators of torch that start them.
_KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "send": "send",
    "all_to_all_single": "exchange",
}


@lru_cache(maxsize=4096)  # asked for every operator that runs
def collective_of(func: Any) -> tuple[str, str | None, int]:
    """Return an operator's name, its kind if it sends, and which argument it sends."""
    name = func.name().split(".")[0]
    space, _, short = name.partition("::")
    sends = "c10d" in space and not short.startswith(("wait", "recv", "barrier"))
    return name, _KINDS.get(short, short) if sends else None, int(short.endswith("base_"))


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
