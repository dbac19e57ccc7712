"""Follow what a pipeline rank holds through a step: activations of micro-batches, and messages of its stages.

The instants that may need most memory are those at which a rank computes a loss or gradients. What each of
them holds follows from the order of actions and from how torch's schedules send:

- A schedule of several stages a rank keeps all that it has sent until the step ends. It receives a message
  when the sender has it, maybe some actions before it is used (``_add_send_recv`` in torch's schedules.py).
- 1F1B keeps what it sent last: the last gradient, and the output before the last one of its warm-up.
- GPipe keeps the gradients that it has sent.

A stage's output is counted with the activations of its micro-batch until their end. What a stage gives to the
next one of the same rank is one message, and no copy.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..parallel_state import Layout
from .schedule_actions import Kind, walk


class Instant(NamedTuple):
    """State what a rank holds while it computes an action: ``F`` on the model's last stage, with its loss, or
    a backward. ``W`` on the model's first stage is a whole backward.

    ``bytes``: of activations and messages. ``messages``: how many hidden states and gradients of one
    micro-batch are held beside the activations. ``absent``: the stages that have had no backward in this
    step, and so have no gradients, each by its place among the rank's stages; ``summed``: in the last
    backward of a stage, those that have had theirs.
    """

    kind: Kind
    stage: int
    bytes: float
    messages: int
    absent: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()


#: What a rank holds at an instant: for each of its stages, the micro-batches whose activations it has, with
#: the one that it computes; for each, those of them whose first part of the backward is done; messages; and
#: whether the instant is in the second half of the step.
_Row = tuple[int, ...]
#: Different rows of each kind of action, stage, and ``absent``, in order.
_Key = tuple[Kind, int, tuple[int, ...]]
_Found = dict[_Key, dict[_Row, None]]


def heaviest(
    name: str, layout: Layout, micro_batches: int, rank: int,
    whole: Sequence[float], halfway: Sequence[float], message: float,
) -> list[Instant]:  # fmt: skip
    """Return the instants of a pipeline rank that hold most bytes, one for each kind of action and stage; and
    those at which gradients are still absent, if they hold more.

    ``whole``, ``halfway``: for each stage of the rank, the bytes of a micro-batch's activations and those
    added by the first part of its backward. ``message``: the bytes of a message.
    """
    rows, weights, further = _weighed(name, layout, micro_batches, rank, whole, halfway, message)
    nbytes = rows.counts @ weights
    instants = list[Instant]()
    with_all = dict[tuple[Kind, int], float]()
    for (kind, stage, absent), start, stop in rows.groups:
        number = start + int(nbytes[start:stop].argmax())
        *_, messages, late = rows.each[number]
        instants.append(Instant(kind, stage, float(nbytes[number]), messages + further * late, absent))
        if not absent:
            with_all[kind, stage] = instants[-1].bytes
    return [
        instant
        for instant in instants
        if not instant.absent
        or micro_batches == 2  # of which the last one differs from the first in other things, too
        or instant.bytes > with_all.get((instant.kind, instant.stage), -1.0)
    ]


def last_backwards(
    name: str, layout: Layout, micro_batches: int, rank: int,
    whole: Sequence[float], halfway: Sequence[float], message: float,
) -> list[Instant]:  # fmt: skip
    """Return what a pipeline rank holds in the last backward of each of its stages, with the arguments of
    ``heaviest``. Gradients that are summed over data ranks once a step are summed then.
    """
    rows, weights, further = _weighed(name, layout, micro_batches, rank, whole, halfway, message)
    nbytes = rows.last @ weights
    here = layout.stages_of(rank)
    places = [here.index(stage) for _, stage, _ in rows.last_of]
    return [
        Instant(
            *(kind, stage, float(nbytes[number]), int(rows.last[number, -2]) + further, absent),
            summed=tuple(sorted(places[:number])),
        )
        for number, (kind, stage, absent) in enumerate(rows.last_of)
    ]


class _Rows(NamedTuple):
    """Hold the rows of a rank, also as an array; where those of each kind and stage start and stop; how many
    messages the rank sends for a micro-batch; and the rows of the ``last`` backward of each stage.
    """

    each: list[_Row]
    counts: NDArray[np.float64]
    groups: list[tuple[_Key, int, int]]
    sends: int
    last: NDArray[np.float64]
    last_of: list[_Key]


def _weighed(
    name: str, layout: Layout, micro_batches: int, rank: int,
    whole: Sequence[float], halfway: Sequence[float], message: float,
) -> tuple[_Rows, NDArray[np.float64], int]:  # fmt: skip
    """Return a rank's rows in a step of few micro-batches, what each of their counts weighs, and how many
    messages are sent for the others, which have been kept by the second half.
    """
    pipeline, few = layout.pipeline, micro_batches
    if pipeline > 1 and name not in _ONE_STAGE:
        # Rounds in the middle of a step are all alike; of three, one begins in the second half.
        few = min(few, 3 * pipeline + few % pipeline)
    rows = _rows(name, pipeline, layout.virtual_stages, layout.v_shape, few, rank)
    further = (micro_batches - few) * rows.sends
    return rows, np.array([*whole, *halfway, message, further * message]), further


@lru_cache(maxsize=1024)
def _rows(
    name: str, pipeline: int, virtual_stages: int, v_shape: bool, micro_batches: int, rank: int
) -> _Rows:
    layout = Layout.of(pipeline=pipeline, virtual_stages=virtual_stages, v_shape=v_shape)
    rows_of: _Found = {}
    last: dict[int, tuple[_Key, _Row]] = {}
    if pipeline == 1 or name in _ONE_STAGE:
        instants = _ONE_STAGE[name if pipeline > 1 else "1f1b"](pipeline, micro_batches, rank)
        for whole, sent, absent in instants:
            rows_of["B", rank, absent] = {(whole, 0, sent + (rank < pipeline - 1), 0): None}
        if rank == pipeline - 1:
            whole, sent, absent = instants[0] if pipeline > 1 and name == "gpipe" else instants[-1]
            rows_of["F", rank, absent] = {(whole, 0, sent, 0): None}
        sent = (micro_batches - 1 if name == "gpipe" else 1) * (rank > 0)
        last[rank] = ("B", rank, ()), (1, 0, sent + (rank < pipeline - 1), 0)
    else:
        events = _with_messages(name, pipeline, virtual_stages, v_shape, micro_batches)[rank]
        for key, row in _states(events, layout, rank):
            rows_of.setdefault(key, {})[row] = None
            if key[0] in "BW":
                last.pop(key[1], None)  # they are in the order of the last ones
                last[key[1]] = key, row
    each, groups = list[_Row](), list[tuple[_Key, int, int]]()
    for key, alike in rows_of.items():
        groups.append((key, len(each), len(each) + len(alike)))
        each += alike
    here = layout.stages_of(rank)
    borders = [other for stage in here for other in (stage - 1, stage + 1)]
    sends = sum(0 <= border < layout.stages and border not in here for border in borders)
    at_last = np.array([row for _, row in last.values()], dtype=float)
    return _Rows(each, np.array(each, dtype=float), groups, sends, at_last, [key for key, _ in last.values()])


#: The micro-batches that a rank holds at an instant, the sent messages that it keeps then, and ``absent``.
_Ahead = tuple[int, int, tuple[int, ...]]


def _gpipe(ranks: int, micro_batches: int, rank: int) -> list[_Ahead]:
    """Return the first backward and the second one, which has gradients."""
    first: _Ahead = (micro_batches, 0, (0,))
    return [first] if micro_batches == 1 else [first, (micro_batches - 1, int(rank > 0), ())]


def _one_forward_one_backward(ranks: int, micro_batches: int, rank: int) -> list[_Ahead]:
    ahead = ranks - rank
    if ahead >= micro_batches:  # no forward follows a backward
        return _gpipe(ranks, micro_batches, rank)
    sent = int(1 < ahead <= (micro_batches + 1) // 2)
    # Of two backwards the first one is no other's like, nor the second one.
    first: list[_Ahead] = [(ahead, sent, (0,))] if micro_batches == 2 else []
    return [*first, (ahead, (rank > 0) + sent, ())]


#: The instants at which a rank may hold most.
_ONE_STAGE = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}


#: What a rank computes, on which stage; or, if the last is true, that what it needs for this arrives.
_Event = tuple[Kind, int, bool]


@lru_cache(maxsize=256)
def _with_messages(
    name: str, pipeline: int, virtual_stages: int, v_shape: bool, micro_batches: int
) -> list[list[_Event]]:
    """Return each rank's actions in order, and between them the messages, received as torch receives them:
    as soon as they are sent.
    """
    steps = walk(name, pipeline, virtual_stages, v_shape, micro_batches)
    receivers = {step.needs: step for step in steps if step.away}
    events: list[list[_Event]] = [[] for _ in range(pipeline)]
    for number, ((kind, stage, _, _), rank, _, _) in enumerate(steps):
        events[rank].append((kind, stage, False))
        if receiver := receivers.get(number):
            arrives: Kind = "F" if kind == "F" else "B"
            events[receiver.rank].append((arrives, receiver.action.stage, True))
    return events


def _states(events: Sequence[_Event], layout: Layout, rank: int) -> Iterator[tuple[_Key, _Row]]:
    """Yield each of a rank's actions that computes a loss or gradients, and what it holds then."""
    here, last = layout.stages_of(rank), layout.stages - 1
    place, size = {stage: number for number, stage in enumerate(here)}, len(here)
    now = [0] * (2 * size + 1)
    absent = tuple(range(size))
    for number, (kind, stage, arrives) in enumerate(events):
        if arrives:
            now[-1] += 1
            continue
        of, late = place[stage], 2 * number >= len(events)
        if kind == "F":
            now[of] += 1
            now[-1] -= stage > 0 and stage - 1 not in place  # it is an input, which is kept
            if stage == last:
                yield (kind, stage, absent), (*now, late)
            continue
        if kind == "I" and stage == 0:
            continue  # torch leaves all of it to the second part
        yield (kind, stage, absent), (*now, late)
        if kind == "I":
            now[size + of] += 1
            # Of the gradient that came a product's weight gradient is made; another one is sent.
            now[-1] += 1 - (stage < last)
            continue
        absent = tuple(stage for stage in absent if stage != of)
        split = kind == "W" and stage > 0
        now[of] -= 1
        now[size + of] -= split
        now[-1] += stage < last and stage + 1 not in place  # the output that was sent is still kept
        if not split:
            now[-1] += (stage > 0) - (stage < last)
