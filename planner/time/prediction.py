"""Hold the predicted time of a step, and what follows: rate, MFU, money and energy, the step part by part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...parallel_state import Layout
from ...pipeline.schedule_actions import Kind
from ...pipeline.timetable import timetable
from ...simulation.model_flops import Mfu, TokenFlops, Utilization
from .stage_timer import StageSeconds

#: The parts of a step, in the order in which they are shown.
PARTS = (
    "compute",
    "recompute",
    "bubble",
    "tensor",
    "context",
    "expert",
    "data",
    "pipeline",
    "optimizer",
    "checkpoint",
)

#: How many times as long as predicted the steps of published runs took: the least, the median and the most.
#: It is told beside predictions on the table's machines, and changes none. A test compares it with all rows.
TIMES_SLOWER = (0.63, 1.09, 2.53)
#: Between which of these numbers the middle half of the runs lies.
MIDDLE_HALF = (0.88, 1.15)


@dataclass(frozen=True)
class StepTime:
    """Hold the seconds of a step by part, and what follows from them.

    ``parts``: compute, recompute, bubble, tensor, context, expert, data, pipeline (all exposed only),
    optimizer, checkpoint. They are those of the pipeline rank that has most to do, and add up to ``seconds``.
    """

    parts: Mapping[str, float]
    #: Tokens of a step and ranks, over all of the run.
    tokens: int
    ranks: int
    flops: TokenFlops
    peak: float
    #: Seconds that each pipeline rank is busy with micro-batches, in order.
    busy: Sequence[float]
    #: Seconds of each stage's actions of one micro-batch, exposed sends included; ``sending``: those in which
    #: a message to the next stage travels beside them.
    stages: Sequence[Mapping[Kind, float]]
    sending: float
    source: str
    #: The same seconds of each stage, by direction and part, without sends between stages.
    by_direction: Sequence[StageSeconds]
    #: Seconds that come once a step, after the micro-batches, by part; in ``parts`` too.
    once: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def rate(self) -> float:
        """Return tokens a second of all ranks together."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> Utilization:
        utilization = Mfu(self.flops, self.ranks, self.peak)(self.rate)
        assert utilization is not None
        return utilization


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
    """Return what the busiest pipeline rank does in a step, in order and without gaps.

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
            for part in PARTS:
                spend(part, time.by_direction[timed.action.stage].get((direction, part), 0.0))
        spend("pipeline", timed.stop - now)  # a message that the rank takes itself
    spend("bubble", table.length - now)
    for part, once in time.once.items():
        spend(part, once)
    return spans
