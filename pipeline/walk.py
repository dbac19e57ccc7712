"""Walk through a step of a pipeline: all ranks' actions in one order, each after those that it waits for.

Times, what arrives when, and what is held all follow from this order and from torch's order on each rank.
"""

from functools import lru_cache
from typing import NamedTuple

from .schedule_actions import Action, actions


class Event(NamedTuple):
    """State an action of a rank. ``needs``: the number of the event that it waits for, or -1; ``away``:
    whether that runs on another rank.
    """

    action: Action
    rank: int
    needs: int
    away: bool


@lru_cache(maxsize=256)
def walk(
    name: str, pipeline: int, virtual_stages: int, v_shape: bool, micro_batches: int
) -> tuple[Event, ...]:
    """Return the events of a step. The ranks take turns, and each computes one action in its turn, or two
    that send together (``Action.paired``), if their inputs are there.
    """
    todo = actions(name, pipeline, virtual_stages, v_shape, micro_batches)
    last = pipeline * virtual_stages - 1
    events: list[Event] = []
    done: dict[tuple[str, int, int] | None, int] = {None: -1}
    at, left = [0] * pipeline, [*range(pipeline)]
    while left:
        before = len(events)
        for rank in left:
            first = todo[rank][at[rank]]
            turn = (first, todo[rank][at[rank] + 1]) if first.paired else (first,)
            if any(_needs(action, last) not in done for action in turn):
                continue
            for action in turn:
                number = done[_needs(action, last)]
                # A whole backward, too, gives the gradient of the input, which the stage before waits for.
                kind = "I" if action.kind == "B" else action.kind
                done[kind, action.stage, action.micro_batch] = len(events)
                events.append(Event(action, rank, number, number >= 0 and events[number].rank != rank))
            at[rank] += len(turn)
        assert len(events) > before, "a schedule that waits for itself"
        left = [rank for rank in left if at[rank] < len(todo[rank])]
    return tuple(events)


def _needs(action: Action, last: int) -> tuple[str, int, int] | None:
    """Return what another stage, or an earlier action of this one, must have done."""
    kind, stage, micro_batch, _ = action
    if kind == "F":
        return ("F", stage - 1, micro_batch) if stage else None
    if kind == "W":
        return ("I", stage, micro_batch)
    return ("F", last, micro_batch) if stage == last else ("I", stage + 1, micro_batch)
