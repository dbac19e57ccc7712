"""List the actions of a pipeline schedule: what each rank computes in a step, in order, without times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Literal

from ..parallel_state import BadInput, Layout, engine
from .schedule_kinds import check_schedule

#: Forwards of a step that are planned at most, over all stages. Torch plans so many in some seconds.
MOST_FORWARDS = 2**15

#: Forward; backward as a whole; its two parts, for the stage's input and for its weights.
Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """State one computation of one stage for one micro-batch.

    ``paired``: the rank sends its result together with that of the next action, not before.
    """

    kind: Kind
    stage: int
    micro_batch: int
    paired: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


@cache
def schedule_classes() -> dict[str, Any]:
    """Return torch's class of each schedule. They are imported here, because they take half a second."""
    schedules = import_module("torch.distributed.pipelining")
    engine.require(engine.PIPELINING)
    return {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }


@cache
def actions(
    name: str, pipeline: int, virtual_stages: int, v_shape: bool, micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return what each pipeline rank computes, in torch's order; no process group is needed to know it."""
    if (forwards := pipeline * virtual_stages * micro_batches) > MOST_FORWARDS:
        expected = f"at most {MOST_FORWARDS:,} stages x micro-batches of a step"
        raise BadInput("schedule", name, expected=expected, found=f"{forwards:,}")
    layout = Layout.of(pipeline=pipeline, virtual_stages=virtual_stages, v_shape=v_shape)
    if pipeline == 1:
        one = tuple(Action(kind, 0, m) for m in range(micro_batches) for kind in _PLAIN)
        return (one,)
    check_schedule(name, layout, micro_batches)
    if layout.virtual_stages == 1:
        return tuple(tuple(_one_stage(name, layout, rank, micro_batches)) for rank in range(pipeline))
    seats = [_seat(number, layout) for number in layout.stages_of(0)]
    order = engine.order_only(schedule_classes()[name])(seats, micro_batches).pipeline_order
    return tuple(
        tuple(found for action in order[rank] if action is not None for found in _read(action))
        for rank in range(pipeline)
    )


def _one_stage(name: str, layout: Layout, rank: int, micro_batches: int) -> Iterator[Action]:
    """Yield the actions of GPipe and 1F1B, for which the order that torch states is not the one that it runs.

    Torch states the last rank of 1F1B wrongly.
    """
    forward = micro_batches if name == "gpipe" else min(layout.pipeline - rank, micro_batches)
    yield from (Action("F", rank, m) for m in range(forward))
    for m in range(micro_batches):
        yield Action("B", rank, m)
        if forward + m < micro_batches:
            yield Action("F", rank, forward + m)


_PLAIN: tuple[Kind, ...] = ("F", "B")
_KINDS: dict[str, Kind] = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}


def _seat(number: int, layout: Layout) -> Any:
    """Return a stand-in with the attributes that torch's schedules read of a stage while they plan."""
    return SimpleNamespace(
        stage_index=number,
        num_stages=layout.stages,
        group_size=layout.pipeline,
        group_rank=0,
        is_first=number == 0,
        is_last=number == layout.stages - 1,
        submod=None,
        has_backward=True,
    )


def _read(action: Any) -> list[Action]:
    """Return our actions for one of torch's; a forward beside a backward becomes two, as torch runs them."""
    if action.sub_actions is not None:
        *before, last = (found for one in action.sub_actions for found in _read(one))
        return [*(replace(one, paired=True) for one in before), last]
    kind = _KINDS.get(action.computation_type.name)  # none of what is sent or summed
    return [] if kind is None else [Action(kind, action.stage_index, action.microbatch_index)]
