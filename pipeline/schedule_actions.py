"""List the actions of a pipeline schedule: what each rank computes in a step, in order, without times."""

from __future__ import annotations

from functools import cache

from ..parallel_state import BadInput, Layout
from .rank_order import ORDERS, Action, Kind
from .schedule_kinds import check_schedule

#: Forwards of a step that are planned at most, over all stages. They take some tenths of a second.
MOST_FORWARDS = 2**15


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
    order = ORDERS[name]
    return tuple(tuple(order(pipeline, layout.stages, micro_batches, rank)) for rank in range(pipeline))


_PLAIN: tuple[Kind, ...] = ("F", "B")
