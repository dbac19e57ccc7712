"""Compute when each rank computes what in a pipeline step: torch's order of actions, timed by unit costs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..parallel_state import Layout
from .schedule_actions import Action, Event, Kind, walk
from .schedule_kinds import schedule_kind

#: Their costs if nothing is measured: each matrix product of forward has two in backward.
UNIT_COSTS: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@dataclass(frozen=True, slots=True)
class Timed:
    """State an action of a rank with its start and stop, in units of a stage's forward or in seconds."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Timetable:
    """Hold one step: what each pipeline rank computes, in order."""

    layout: Layout
    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def length(self) -> float:
        """Return the time from the first rank's start to the last rank's stop."""
        return max(timed.stop for rank in self.ranks for timed in rank)

    def idle(self, rank: int) -> float:
        """Return the share of the step in which a rank waits."""
        return 1 - sum(timed.stop - timed.start for timed in self.ranks[rank]) / self.length

    @property
    def bubble(self) -> float:
        """Return the share of the step in which ranks wait, over all ranks."""
        return sum(map(self.idle, range(len(self.ranks)))) / len(self.ranks)

    def most_held(self, rank: int) -> int:
        """Return the most activations that a rank holds at once; those of one stage for one micro-batch
        count as one.
        """
        return most_held([timed.action for timed in self.ranks[rank]])[0]


def layout_of(name: str, pipeline: int, virtual_stages: int | None = None) -> Layout:
    """Return the layout of a pipeline alone, with this schedule."""
    kind = schedule_kind(name)
    virtual = virtual_stages or kind.virtual_stages
    return Layout.of(
        pipeline=pipeline,
        virtual_stages=virtual if pipeline > 1 else 1,
        v_shape=kind.v_shape and pipeline > 1 and virtual == 2,
    )


def timetable(
    name: str,
    layout: Layout,
    micro_batches: int,
    costs: Mapping[Kind, float] | Sequence[Mapping[Kind, float]] = UNIT_COSTS,
    sending: float = 0.0,
) -> Timetable:
    """Return the timetable in which each action starts when its rank is free and its inputs are there.

    ``costs``: those of every stage, or of each stage of the model in order. ``sending``: the time from the
    end of an action until another rank has its result. Raises ``BadInput`` if the schedule cannot run.
    """
    events = walk(name, layout.pipeline, layout.virtual_stages, layout.v_shape, micro_batches)
    of_stage = [costs] * layout.stages if isinstance(costs, Mapping) else costs
    ranks: list[list[Timed]] = [[] for _ in range(layout.pipeline)]
    times = zip(*_times(events, layout.pipeline, of_stage, sending), strict=True)
    for event, (start, stop) in zip(events, times, strict=True):
        ranks[event.rank].append(Timed(event.action, start, stop))
    return Timetable(layout, tuple(map(tuple, ranks)))


def _times(
    events: Sequence[Event], ranks: int, of_stage: Sequence[Mapping[Kind, float]], sending: float
) -> tuple[list[float], list[float]]:
    """Return when each of a walk's events starts and stops. There may be 100,000."""
    free = [0.0] * ranks
    starts, stops, ready = list[float](), list[float](), list[float]()
    for number, ((kind, stage, _, paired), rank, needs, away) in enumerate(events):
        start = free[rank]
        if needs >= 0:
            come = ready[needs] + sending if away else ready[needs]
            if come > start:
                start = come
        stop = free[rank] = start + of_stage[stage][kind]
        starts.append(start)
        stops.append(stop)
        if paired:  # it is sent together with what the next action gives
            kind, stage, *_ = events[number + 1].action
            stop += of_stage[stage][kind]
        ready.append(stop)
    return starts, stops


#: Rounds of a pipeline's micro-batches after which each further round takes equally long.
_ROUNDS = 4


def step_length(
    name: str, layout: Layout, micro_batches: int, costs: Sequence[Mapping[Kind, float]], sending: float
) -> float:
    """Return the length of ``timetable``, of many micro-batches too: a few rounds are timed, and each
    further round takes as long as the last of these.
    """

    def length(number: int) -> float:
        events = walk(name, layout.pipeline, layout.virtual_stages, layout.v_shape, number)
        return max(_times(events, layout.pipeline, costs, sending)[1])

    few = few_micro_batches(name, layout, micro_batches)
    if few == micro_batches:
        return length(micro_batches)
    first, second = length(few - layout.pipeline), length(few)
    return second + (second - first) * ((micro_batches - few) // layout.pipeline)


def few_micro_batches(name: str, layout: Layout, micro_batches: int) -> int:
    """Return a number of micro-batches whose timetable shows all that happens in one of ``micro_batches``."""
    least = _ROUNDS * layout.pipeline + micro_batches % layout.pipeline
    few, runs = least + layout.pipeline, schedule_kind(name).runs
    if micro_batches <= few or not all(runs(layout.pipeline, count) for count in (least, few)):
        return micro_batches
    return few


def most_held(order: Sequence[Action]) -> tuple[int, int]:
    """Count the micro-batches whose activations a rank holds, from the forward to the end of the backward, at
    the instant when it holds most; and those whose input gradient is computed and whose weight gradient is
    not: they also hold what the weight gradient is computed from, half as much again.
    """
    now = most = 0, 0
    for kind, *_ in order:
        whole, halfway = now
        now = whole + {"F": 1, "I": 0}.get(kind, -1), halfway + (kind == "I") - (kind == "W")
        most = max(most, now, key=lambda counts: 2 * counts[0] + counts[1])
    return most


def timetable_lines(table: Timetable, *, width: int = 110) -> Iterator[str]:
    """Return the timetable in as many blocks of lines as ``width`` columns need.

    ``F3`` is a forward for micro-batch 3, ``B3`` its backward, ``I3`` and ``W3`` the two halves of one. Small
    letters are of the rank's second and later stages. Dots are waiting.
    """
    micro_batches = 1 + max(timed.action.micro_batch for rank in table.ranks for timed in rank)
    cell = 2 + len(str(micro_batches - 1))
    rows = [_row(table, rank, cell) for rank in range(len(table.ranks))]
    length = max(map(len, rows))
    width = max(cell, (width - 9) // cell * cell)
    for start in range(0, length, width):
        for rank, row in enumerate(rows):
            yield f"rank {rank:<3} {row[start : start + width].rstrip()}"
        if start + width < length:
            yield ""


def _row(table: Timetable, rank: int, cell: int) -> str:
    first = table.layout.stages_of(rank)[0]
    columns = ["." + " " * (cell - 1)] * round(table.length)
    for timed in table.ranks[rank]:
        begin, stop = round(timed.start), round(timed.stop)
        word = str(timed.action) if timed.action.stage == first else str(timed.action).lower()
        columns[begin] = word.ljust(cell)
        for column in range(begin + 1, stop):
            columns[column] = "-" * (cell - 1) + " "
    return "".join(columns)
