"""Walk through a step of a pipeline: all ranks' actions in one order, each after those that it waits for.

Times, what arrives when, and what is held all follow from this order and from torch's order on each rank.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .schedule_actions import Action, actions

#: The kind of an action that ran, its stage and its micro-batch.
_Done = tuple[str, int, int]


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
    orders = actions(name, pipeline, virtual_stages, v_shape, micro_batches)
    turns = [_turns(order, pipeline * virtual_stages - 1) for order in orders]
    events: list[Event] = []
    done: dict[_Done | None, int] = {None: -1}
    at, left = [0] * pipeline, [*range(pipeline)]
    while left:
        before = len(events)
        for rank in left:
            turn = turns[rank][at[rank]]
            if any(needs not in done for _, needs in turn):
                continue
            for action, needs in turn:
                number = done[needs]
                # A whole backward, too, gives the gradient of the input, which the stage before waits for.
                kind = "I" if action.kind == "B" else action.kind
                done[kind, action.stage, action.micro_batch] = len(events)
                events.append(Event(action, rank, number, number >= 0 and events[number].rank != rank))
            at[rank] += 1
        assert len(events) > before, "a schedule that waits for itself"
        left = [rank for rank in left if at[rank] < len(turns[rank])]
    return tuple(events)


def _turns(order: Sequence[Action], last: int) -> list[list[tuple[Action, _Done | None]]]:
    """Return the actions of each turn of a rank, each with what it needs; ``last``: the last stage."""
    turns, joins = list[list[tuple[Action, _Done | None]]](), False
    for action in order:
        if not joins:
            turns.append([])
        turns[-1].append((action, _needs(action, last)))
        joins = action.paired
    return turns


def _needs(action: Action, last: int) -> _Done | None:
    """Return what another stage, or an earlier action of this one, must have done."""
    kind, stage, micro_batch, _ = action
    if kind == "F":
        return ("F", stage - 1, micro_batch) if stage else None
    if kind == "W":
        return ("I", stage, micro_batch)
    return ("F", last, micro_batch) if stage == last else ("I", stage + 1, micro_batch)
