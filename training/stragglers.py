"""Name the rank that the others wait for: now and then, ranks compare the time of their own work in a step.

Ranks end a step together, because collectives hold the fast ones back. So a rank counts what is left of its
step without the time that it waited in collectives.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median_low
from typing import TYPE_CHECKING, Any

from ..parallel_state import together
from ..parallel_state.engine.measuring import Waited, waiting_time
from ..runs.metrics import StepMetrics
from .callbacks import Callback

if TYPE_CHECKING:
    from .trainer import Trainer

#: How many times the median's time is slow, unless a recipe says.
_SLOW = 1.5
#: Seconds by which a rank may be slower whatever the ratio: steps of tiny models vary by as much.
_NOISE = 0.05


class Stragglers(Callback):
    """Measure the steps of a run whose lines are printed, on every rank.

    A rank is slow if its own work takes more than ``watch.slow_rank`` times the median of the ranks of its
    pipeline stage, which do the same work, and more than ``_NOISE``; 0 measures nothing. ``None``: ``_SLOW``,
    but CPU ranks that are all on one host take its cores from each other, so that the first measured step is
    the last one.
    """

    def begin(self, trainer: Trainer, start: int) -> None:
        self._state, self._recipe, self._times = trainer.state, trainer.recipe, trainer.recipe.watch.slow_rank

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Measure step ``number``, from 0, if its turn has come."""
        self._waited: Waited | None = None
        if self._times == 0 or self._state.layout.world == 1 or (number + 1) % self._recipe.log_every:
            yield
            return
        with waiting_time(self._state.device, compiled=self._recipe.compiles) as self._waited:
            yield

    def after(self, metrics: StepMetrics) -> Mapping[str, Any] | None:
        """Name the slowest rank of a step that was measured, if it is slow; collective in such a step."""
        if self._waited is None:
            return None
        layout, own = self._state.layout, max(0.0, metrics.seconds - self._waited.seconds)
        seconds, hosts = zip(*together(lambda: (own, socket.gethostname()), self._state), strict=True)
        if self._times is None:
            on_one_host = self._state.device.type == "cpu" and len(set(hosts)) == 1
            self._times = 0.0 if on_one_host else _SLOW
        stages = [layout.coordinates(rank).pipeline for rank in range(layout.world)]
        rank, times = slowest_of(seconds, stages)
        if not self._times or times <= self._times or seconds[rank] - seconds[rank] / times < _NOISE:
            return None
        return {"slow_rank": rank, "slow_host": hosts[rank], "slow_times": times}


def slowest_of(seconds: Sequence[float], stages: Sequence[int]) -> tuple[int, float]:
    """Return the slowest rank, compared with the median of its stage, and its seconds over this median.

    A stage with a single rank has no other rank to compare with. If every stage has one rank, each rank is
    compared with the median of all ranks.
    """
    if len(set(stages)) == len(stages):
        stages = [0] * len(stages)
    median = {
        stage: median_low([time for time, its in zip(seconds, stages, strict=True) if its == stage])
        for stage in set(stages)
    }
    medians = [median[stage] for stage in stages]
    times = [time / middle if middle else 1.0 for time, middle in zip(seconds, medians, strict=True)]
    rank = max(range(len(times)), key=times.__getitem__)
    return rank, times[rank]
