"""Hold the predicted time of a step: its parts, and the rate, MFU, time, money and energy that follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...pipeline.schedule_actions import Kind
from ...simulation.model_flops import Mfu, TokenFlops, Utilization
from .stage_seconds import StageSeconds

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
TIMES_SLOWER = (0.45, 1.11, 2.36)
#: Between which of these numbers the middle half of the runs lies.
MIDDLE_HALF = (0.81, 1.22)


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


@dataclass(frozen=True)
class Spending:
    """State what a number of tokens takes: seconds, GPU-hours, and at a price and a wattage money and kWh."""

    seconds: float
    gpu_hours: float
    cost: float | None
    kilowatt_hours: float

    @property
    def days(self) -> float:
        return self.seconds / 86400


def spending(time: StepTime, tokens: float, *, watts: float, price: float | None = None) -> Spending:
    """Return what training on ``tokens`` takes. ``price``: of a GPU for an hour; ``watts``: of a GPU."""
    seconds = tokens / time.rate
    hours = seconds * time.ranks / 3600
    cost = None if price is None else hours * price
    return Spending(seconds, hours, cost, hours * watts / 1000)
