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
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..parallel_state import Layout
from .schedule_actions import Kind, walk
from .schedule_kinds import schedule_kind


class Instant(NamedTuple):
    """State what a rank holds while it computes an action: ``F`` on the model's last stage, with its loss, or
    on the first one if a rank holds both, or a backward. ``W`` on the first stage is a whole backward.

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
#: A kind of action, a stage, and ``absent``.
_Key = tuple[Kind, int, tuple[int, ...]]


class HeldInStep:
    """Weigh what a pipeline rank holds at the instants of a step.

    ``whole``, ``halfway``: for each stage of the rank, the bytes of a micro-batch's activations and those
    added by the first part of its backward. ``message``: the bytes of a message.
    """

    def __init__(
        self, name: str, layout: Layout, micro_batches: int, rank: int,
        whole: Sequence[float], halfway: Sequence[float], message: float,
    ) -> None:  # fmt: skip
        pipeline, few = layout.pipeline, micro_batches
        if pipeline > 1 and name not in _ONE_STAGE:
            # Rounds in the middle of a step are all alike; of three, one begins in the second half. Those of
            # an interleaved schedule may be longer than the pipeline: 32 micro-batches over 7 are 4 times 8.
            size = few // max(1, few // pipeline) if schedule_kind(name).interleaved else pipeline
            few = min(few, 3 * size + few % size)
        self._rows = _rows(name, pipeline, layout.virtual_stages, layout.v_shape, few, rank)
        self._here, self._micro_batches = layout.stages_of(rank), micro_batches
        #: How many messages are sent for the others, which have been kept by the second half.
        self._further = (micro_batches - few) * self._rows.sends
        self._weights = np.array([*whole, *halfway, message, self._further * message])

    @cached_property
    def heaviest(self) -> list[Instant]:
        """Return the instants that hold most bytes, one for each kind of action and stage; and those at which
        gradients are still absent, if they hold more.
        """
        rows, instants = self._rows, list[Instant]()
        nbytes = rows.counts @ self._weights
        with_all = dict[tuple[Kind, int], float]()
        for (kind, stage, absent), part in rows.slices.items():
            number = part.start + int(nbytes[part].argmax())
            *_, messages, late = rows.rows[number]
            size = float(nbytes[number])
            instants.append(Instant(kind, stage, size, messages + self._further * late, absent))
            if not absent:
                with_all[kind, stage] = size
        return [
            instant
            for instant in instants
            if not instant.absent
            or self._micro_batches == 2  # of which the last one differs from the first in other things, too
            or instant.bytes > with_all.get((instant.kind, instant.stage), -1.0)
        ]

    @property
    def first_forwards(self) -> list[Instant]:
        """Return what the rank holds in the first forward of each of its stages, as if at its end."""
        return [
            Instant(kind, stage, float(np.dot(row, self._weights)), row[-2], absent)
            for (kind, stage, absent), row in self._rows.first
        ]

    def last_backwards(self) -> list[Instant]:
        """Return what the rank holds in the last backward of each of its stages. Gradients that are summed
        over data ranks once a step are summed then.
        """
        nbytes = np.array([row for _, row in self._rows.last], dtype=float) @ self._weights
        instants, summed = list[Instant](), list[int]()
        for size, ((kind, stage, absent), row) in zip(nbytes.tolist(), self._rows.last, strict=True):
            ended = tuple(sorted(summed))
            instants.append(Instant(kind, stage, size, row[-2] + self._further, absent, ended))
            summed.append(self._here.index(stage))
        return instants


#: Give it a layout of a pipeline alone: layouts that differ in their data ranks have one object.
held_in_step = lru_cache(maxsize=4096)(HeldInStep)


class _Rows(NamedTuple):
    """Hold the rows of a rank, also as an array; where those of each key are; those of the ``first`` forward
    of each stage, and of its ``last`` backward; and how many messages the rank sends for a micro-batch.
    """

    rows: list[_Row]
    counts: NDArray[np.float64]
    slices: dict[_Key, slice]
    first: list[tuple[_Key, _Row]]
    last: list[tuple[_Key, _Row]]
    sends: int


@lru_cache(maxsize=1024)
def _rows(
    name: str, pipeline: int, virtual_stages: int, v_shape: bool, micro_batches: int, rank: int
) -> _Rows:
    layout = Layout.of(pipeline=pipeline, virtual_stages=virtual_stages, v_shape=v_shape)
    rows_of: dict[_Key, dict[_Row, None]] = {}
    first, last = dict[int, tuple[_Key, _Row]](), dict[int, tuple[_Key, _Row]]()
    if pipeline == 1 or name in _ONE_STAGE:
        instants = _ONE_STAGE[name if pipeline > 1 else "1f1b"](pipeline, micro_batches, rank)
        comes = int(rank < pipeline - 1)
        for whole, sent, absent in instants:
            rows_of["B", rank, absent] = {(whole, 0, sent + comes, 0): None}
        if not comes:
            whole, sent, absent = instants[0] if pipeline > 1 and name == "gpipe" else instants[-1]
            rows_of["F", rank, absent] = {(whole, 0, sent, 0): None}
        sent = (micro_batches - 1 if name == "gpipe" else 1) * (rank > 0)
        first[rank] = ("F", rank, (0,)), (1, 0, 0, 0)
        last[rank] = ("B", rank, ()), (1, 0, sent + comes, 0)
    else:
        events = _with_messages(name, pipeline, virtual_stages, v_shape, micro_batches)[rank]
        for key, row in _states(events, layout, rank):
            if key[0] == "F":
                first.setdefault(key[1], (key, row))
            if key[0] != "F" or key[1] == layout.stages - 1 or (v_shape and key[1] == 0):
                rows_of.setdefault(key, {})[row] = None
            if key[0] in "BW":
                last.pop(key[1], None)  # they are in the order of the last ones
                last[key[1]] = key, row
    rows, slices = list[_Row](), dict[_Key, slice]()
    for key, of_key in rows_of.items():
        slices[key] = slice(len(rows), len(rows) + len(of_key))
        rows += of_key
    stages = layout.stages_of(rank)
    borders = [other for stage in stages for other in (stage - 1, stage + 1)]
    sends = sum(0 <= border < layout.stages and border not in stages for border in borders)
    return _Rows(rows, np.array(rows, dtype=float), slices, [*first.values()], [*last.values()], sends)


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
    """Yield each of a rank's actions, and what it holds then."""
    stages, last = layout.stages_of(rank), layout.stages - 1
    place, size = {stage: number for number, stage in enumerate(stages)}, len(stages)
    now = [0] * (2 * size + 1)
    absent = tuple(range(size))
    for number, (kind, stage, arrives) in enumerate(events):
        if arrives:
            now[-1] += 1
            continue
        own, late = place[stage], 2 * number >= len(events)
        if kind == "F":
            now[own] += 1
            now[-1] -= stage > 0 and stage - 1 not in place  # it is an input, which is kept
            yield (kind, stage, absent), (*now, late)
            continue
        if kind == "I" and stage == 0:
            continue  # torch leaves all of it to the second part
        yield (kind, stage, absent), (*now, late)
        if kind == "I":
            now[size + own] += 1
            # Of the gradient that came a product's weight gradient is made; another one is sent.
            now[-1] += 1 - (stage < last)
            continue
        absent = tuple(stage for stage in absent if stage != own)
        split = kind == "W" and stage > 0
        now[own] -= 1
        now[size + own] -= split
        now[-1] += stage < last and stage + 1 not in place  # the output that was sent is still kept
        if not split:
            now[-1] += (stage > 0) - (stage < last)
