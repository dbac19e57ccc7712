"""Compare what a rank sends in a step with its plan: the count and the bytes of each axis and kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist
from trilith.parallel_state import ParallelState, clip_gradients, initialize
from trilith.planner import Traffic, Work, step_traffic
from trilith.testing.operators import Operators

from support.short_training import Case, build_rank, model_of, rank_batch

#: Number and bytes of the collectives of an axis and a kind.
Totals = dict[tuple[str, str], tuple[int, int]]


def sent_and_planned(cases: Sequence[Case]) -> list[tuple[Totals, Totals]]:
    """Return, for each case, what this rank sends in the second step and what is planned."""
    return [_sent_and_planned(case) for case in cases]


def _sent_and_planned(case: Case) -> tuple[Totals, Totals]:
    state = ParallelState.start(case.layout)
    model, _, config = model_of(case, ParallelState.stand_in(case.layout, state.rank))
    size = case.dtype.itemsize
    work = Work(
        model.state,
        config.hidden_size,
        case.length,
        case.micro_batch,
        case.samples // (case.layout.data * case.micro_batch),
        schedule=case.schedule,
        master=size,
        compute=(case.compute or case.dtype).itemsize,
        reduce=size,
        checkpointing=case.memory.checkpointing,
        checkpoint_every=case.memory.every,
        loss_chunk=case.memory.stated_chunk,
        offload=case.memory.offload,
    )
    planned = added(step_traffic(work, model))
    parts = build_rank(case, state)
    initialize(parts.model, case.seed, state=state)
    batch = rank_batch(case, 0, state)

    def step() -> None:
        parts.step.launch(batch)
        clip_gradients(parts.model, case.clip, state=state)

    step()  # FSDP and pipelines make themselves ready
    parts.optimizer.zero_grad()
    return sent_by(step, state), planned


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
