"""List the actions of a pipeline schedule, without times: each rank's in its order, and all in one order.

The order on a rank is that of torch's own classes, but their import takes half a second, which is long for a
plan. A test compares both. Times, what arrives when, and what is held all follow from it (``walk``).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Literal, NamedTuple

from ..parallel_state import Layout, require
from .schedule_kinds import check_schedule

#: Forwards of a step that are planned at most, over all stages. They take some tenths of a second.
MOST_FORWARDS = 2**15

#: Forward; backward as a whole; its two parts, for the stage's input and for its weights.
Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """State one computation of one stage for one micro-batch.

    ``paired``: the rank sends its result together with that of the next action, not before.
    """

    kind: Kind
    stage: int
    micro_batch: int
    paired: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


class _Order:
    """Number the micro-batches of each stage: forwards and backwards come in the order of micro-batches."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[bool, int]] = Counter()
        self._waiting: list[Action] = []  # whose weights have no gradient yet

    def add(self, *steps: tuple[Kind, int | None], times: int = 1, paired: bool = False) -> None:
        """Add actions, each a kind and a stage, ``times`` in a row; ``paired``: whether the first of them is.

        ``W`` is the second part of the oldest backward that lacks it, of this stage or of any (``None``), if
        there is one.
        """
        for _ in range(times):
            for number, (kind, stage) in enumerate(steps):
                if kind == "W":
                    for place, (_, waiting, micro_batch, _) in enumerate(self._waiting):
                        if stage in (None, waiting):
                            del self._waiting[place]
                            self.actions.append(Action("W", waiting, micro_batch))
                            break
                    continue
                assert stage is not None
                side = kind == "F", stage
                action = Action(kind, stage, self._next[side], paired and not number)
                self._next[side] += 1
                self.actions.append(action)
                if kind == "I":
                    self._waiting.append(action)


def gpipe(ranks: int, stages: int, count: int, rank: int) -> list[Action]:
    """Return all forwards, and then all backwards."""
    order = _Order()
    order.add(("F", rank), times=count)
    order.add(("B", rank), times=count)
    return order.actions


def interleaved(ranks: int, stages: int, count: int, rank: int, *, apart: bool = False) -> list[Action]:
    """Return 1F1B (Narayanan et al. 2019): as many forwards as ranks follow, then a backward for each; over
    several stages of a rank (Narayanan et al. 2021) each stage for one round of micro-batches.

    ``apart``: with backwards in two parts (ZB1P of Qi et al. 2023), of which the second comes later.
    """
    own, total = stages // ranks, stages // ranks * count
    round_size, order = count // max(1, count // ranks), list[Action]()

    def in_order(kind: Kind, turns: range) -> list[Action]:
        rounds = (range(count)[start : start + round_size] for start in range(0, count, round_size))
        return [Action(kind, turn * ranks + rank, i) for part in rounds for turn in turns for i in part]

    forwards, up = in_order("F", range(own)), range(own - 1, -1, -1)
    backwards, weights = in_order("I" if apart else "B", up), in_order("W", up) if apart else []
    ahead = (own - 1) * round_size + (2 if own > 1 and not apart else 1) * (ranks - 1 - rank)
    for number in range(-ahead, total + rank):
        order += forwards[ahead + number : ahead + number + 1]
        if number >= 0:
            order += backwards[number : number + 1]
        if number >= rank:
            order += weights[number - rank : number - rank + 1]
    return order


def zbv(ranks: int, stages: int, count: int, rank: int) -> list[Action]:
    """Return ZB-V (Qi et al. 2023, section 6) over the two stages of a rank on a V."""
    order, down, up = _Order(), rank, stages - 1 - rank
    add, after, most = order.add, ranks - rank, max(stages - 1, count)
    add(("F", down), times=2 * after - 1)
    add(("F", up), ("F", down), times=rank)
    add(("F", up), ("I", up), ("W", up), times=after)
    began, ended = stages - rank - 1, ranks
    while ended < began or began < most:
        if began < most:
            add(("F", down))
            began += 1
        add(("I", down), ("W", down), ("F", up), ("I", up), ("W", up))
        ended += 1
    add(("I", down), ("I", up), times=rank)
    add(("I", down), ("W", down), times=after)
    add(("W", up), times=most)
    add(("W", down), times=most)
    # With few micro-batches the same order stands, with gaps.
    return [action for action in order.actions if action.micro_batch < count]


def dualpipev(ranks: int, stages: int, count: int, rank: int) -> list[Action]:
    """Return DualPipeV (DeepSeek-AI 2024, cut in half): pairs of a forward and a backward."""
    order, down, up = _Order(), rank, stages - 1 - rank
    add, after = order.add, ranks - rank - 1
    add(("F", down), times=2 * after)
    add(("F", down), ("F", up), times=rank + 1)
    add(("I", up), ("W", up), ("F", up), times=after)
    for number in range(count - stages + rank + 1):
        add(("F", down), ("B", up), paired=number > 0 or after > 0)
        add(("F", up), ("B", down), paired=True)
    for _ in range(after):
        add(("B", up))
        add(("F", up), ("B", down), paired=True)
    kind: Kind = "B"
    for number in range(rank + 1):
        for stage, odd in ((up, 1), (down, 0)):
            if number == (rank + 1) // 2 and rank % 2 == odd:
                kind = "I"
            add((kind, stage))
    add(("W", None), (kind, down), times=after)
    add(("W", None), times=rank + 1)
    return order.actions


#: Each returns a rank's actions, given the numbers of ranks, stages and micro-batches and the rank's number.
ORDERS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "gpipe": gpipe,
    "1f1b": interleaved,
    "interleaved": interleaved,
    "interleaved-zero-bubble": partial(interleaved, apart=True),
    "zbv": zbv,
    "dualpipev": dualpipev,
}


@lru_cache(maxsize=256)
def actions(
    name: str, pipeline: int, virtual_stages: int, v_shape: bool, micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return what each pipeline rank computes, in torch's order; no process group is needed to know it."""
    forwards, virtual = pipeline * virtual_stages * micro_batches, "virtual stages x " * (virtual_stages > 1)
    expected = f"at most {MOST_FORWARDS:,} stages x {virtual}micro-batches of a step"
    require(forwards <= MOST_FORWARDS, "schedule", name, expected, f"{forwards:,}")
    layout = Layout.of(pipeline=pipeline, virtual_stages=virtual_stages, v_shape=v_shape)
    check_schedule(name, layout, micro_batches)
    order = ORDERS[name] if pipeline > 1 else interleaved
    return tuple(tuple(order(pipeline, layout.stages, micro_batches, rank)) for rank in range(pipeline))


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
    turns = [_turns(order, pipeline * virtual_stages, micro_batches) for order in orders]
    events: list[Event] = []
    done = [-2] * (2 * pipeline * virtual_stages * micro_batches + 1) + [-1]  # -2: not done so far
    at, unfinished = [0] * pipeline, [*range(pipeline)]
    while unfinished:
        before = len(events)
        for rank in unfinished:
            turn = turns[rank][at[rank]]
            for _, needs, _ in turn:
                if done[needs] == -2:
                    break
            else:
                at[rank] += 1
                for action, needs, gives in turn:
                    number, done[gives] = done[needs], len(events)
                    events.append(Event(action, rank, number, number >= 0 and events[number].rank != rank))
        assert len(events) > before, "a schedule that waits for itself"
        unfinished = [rank for rank in unfinished if at[rank] < len(turns[rank])]
    return tuple(events)


def _turns(order: Sequence[Action], stages: int, count: int) -> list[list[tuple[Action, int, int]]]:
    """Return the actions of each turn of a rank, each with the number of what it needs of another stage, or
    of an earlier action of this one, and of what it gives.

    The forwards of ``stages`` with ``count`` micro-batches have the first numbers, gradients of inputs the
    next ones. -1 is nothing to wait for, -2 is given to nobody.
    """
    turns, joins = list[list[tuple[Action, int, int]]](), False
    for action in order:
        kind, stage, micro_batch, paired = action
        output = stage * count + micro_batch
        gradient = stages * count + output
        if kind == "F":
            needs, gives = output - count if stage else -1, output
        elif kind == "W":
            needs, gives = gradient, -2
        else:  # a whole backward, too, gives the gradient of the input, which the stage before needs
            needs, gives = output if stage == stages - 1 else gradient + count, gradient
        if not joins:
            turns.append([])
        turns[-1].append((action, needs, gives))
        joins = paired
    return turns
