"""Lay out in time what the pipeline rank that is busy longest spends a predicted step on, part by part."""

from typing import NamedTuple

from ...parallel_state import Layout
from ...pipeline.schedule_actions import Kind
from ...pipeline.timetable import timetable
from .prediction import PARTS, StepTime

#: In which of its two or three directions an action of a kind spends seconds.
_DIRECTIONS: dict[Kind, tuple[str, ...]] = {
    "F": ("forward",),
    "I": ("inputs",),
    "W": ("weights",),
    "B": ("inputs", "weights"),
}


class Span(NamedTuple):
    """State that a rank spends seconds on a part of ``PARTS``, from ``start`` on."""

    part: str
    start: float
    seconds: float


def rank_step(schedule: str, layout: Layout, micro_batches: int, time: StepTime) -> list[Span]:
    """Return what the busiest pipeline rank does in a step of so many micro-batches, in order, without gaps.

    Inside an action the parts follow each other in the order of ``PARTS``; in truth the exchanges of an
    action lie between its products. What the rank waits for is ``bubble``: other ranks, and messages that
    travel beside. What it does once a step comes last. All in seconds.
    """
    rank = max(range(layout.pipeline), key=lambda number: time.busy[number])
    table = timetable(schedule, layout, micro_batches, time.stages, time.sending)
    spans: list[Span] = []
    now, rounding = 0.0, 1e-9 * table.length

    def spend(part: str, seconds: float) -> None:
        nonlocal now
        if seconds > rounding:
            spans.append(Span(part, now, seconds))
            now += seconds

    for timed in table.ranks[rank]:
        spend("bubble", timed.start - now)
        for direction in _DIRECTIONS[timed.action.kind]:
            seconds: dict[str, float] = getattr(time.by_direction[timed.action.stage], direction)
            for part in PARTS:
                spend(part, seconds.get(part, 0.0))
        spend("pipeline", timed.stop - now)  # a message that the rank takes itself
    spend("bubble", table.length - now)
    for part, once in time.once.items():
        spend(part, once)
    return spans
