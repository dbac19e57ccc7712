"""Compare what a rank sends in a step with its plan: the count and the bytes of each axis and kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist

from ..parallel_state import ParallelState
from ..planner import Traffic
from .operators import Operators

#: Number and bytes of the collectives of an axis and a kind.
Totals = dict[tuple[str, str], tuple[int, int]]


def sent_by(function: Callable[[], object], state: ParallelState) -> Totals:
    """Call ``function`` and return what this rank sends meanwhile. Tokens on their way to experts do not
    count: a plan cannot know them.
    """
    axes = _axes(state)
    with Operators() as operators:
        function()
    found: Totals = {}
    for (group, kind), (count, size) in operators.in_groups.items():
        axis = axes.get(group, group)
        if axis != "expert":
            found[axis, kind] = count, size
    return found


def added(every: Iterable[Traffic]) -> Totals:
    """Add up planned traffic by axis and kind."""
    found: Totals = {}
    for one in every:
        count, size = found.get((one.axis, one.kind), (0, 0))
        found[one.axis, one.kind] = count + one.count, size + one.bytes
    return found


def _axes(state: ParallelState) -> dict[str, str]:
    """Return the axis of each process group, as ``Traffic`` calls it, by the group's name."""
    layout, mesh = state.layout, state.data_mesh
    groups: dict[str, dist.ProcessGroup | None] = {
        "all": dist.group.WORLD,
        "tensor": state.tensor_group,
        "pipeline": state.pipeline_group,
        "ends": state.ends_group if layout.pipeline > 1 else None,
        "context": state.context_group if layout.context > 1 else None,
        "data": mesh.get_group("fsdp"),
        "replicas": mesh.get_group("data_replicate") if layout.copies_shards else state.replica_group(),
    }
    if layout.expert > 1:
        stacks = state.expert_data_mesh
        groups |= {
            "expert": state.expert_group,
            "expert data": stacks.get_group("expert_shard"),
            "expert replicas": (
                stacks.get_group("expert_replicate")
                if layout.copies_shards
                else state.replica_group(experts=True)
            ),
        }
    # Axes of one rank share a group, over which nothing should be sent.
    return {one.group_name: axis for axis, one in groups.items() if one is not None and one.size() > 1}
