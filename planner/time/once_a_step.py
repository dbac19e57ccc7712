"""Time what a pipeline rank does once a step: sums over ranks, clipping, and the optimizer."""

from collections.abc import Sequence
from typing import Any

from ..rank_parameters import RankParameters
from .machines import Machine
from .stage_seconds import StageSeconds
from .stage_timer import StageTimer


class OnceAStep:
    """Time the end of a step in the layout of ``timer``.

    ``known``: seconds that were computed before on the same machine; new ones are added.
    """

    def __init__(self, timer: StageTimer, machine: Machine, known: dict[Any, Any]) -> None:
        self.timer, self.machine, self._known = timer, machine, known
        self.work, self.layout, self.links = timer.work, timer.layout, timer.links

    def exchange(self, stages: Sequence[StageSeconds], parameters: RankParameters) -> float:
        """Return the exposed seconds of what a rank with these stages exchanges once a step."""
        layout, exposed, seconds = self.layout, self.links.exposed, 0.0
        if not layout.holds_alone and layout.zero < 3:
            exchanges = [(self.timer.exchange(group), number) for group, number in parameters.kinds]
            root, _ = exchanges[0]
            if layout.zero > 0:  # weights, beside the first forward
                forward = sum(stage.costs["F"] for stage in stages)
                seconds += max(
                    root.gather, exposed(sum(exchange.gather * n for exchange, n in exchanges), forward)
                )
            if layout.zero < 2:
                sums = sum((exchange.scatter + exchange.replicas) * n for exchange, n in exchanges)
                last = root.scatter + root.replicas
                backward = sum(stage.costs["B"] for stage in stages)
                seconds += sums if self.timer.in_two else max(last, exposed(sums, backward))
        return seconds + self._sums_of_all(parameters)

    def _sums_of_all(self, parameters: RankParameters) -> float:
        """Return the seconds of the sums of single parameters, and of numbers that all ranks sum."""
        key = "once", id(parameters), self.layout.pipeline, self.layout.world
        if key not in self._known:
            size, seconds = max(self.work.master, self.work.reduce), self.links.seconds
            total = seconds("tensor", "all_reduce", parameters.every.partial * size)
            total += seconds("ends", "all_reduce", parameters.every.ends * size)
            self._known[key] = total + 3 * seconds("all", "all_reduce", 8)
        once: float = self._known[key]
        return once

    def update(self, parameters: RankParameters) -> float:
        """Time clipping, which reads gradients twice and writes them, and AdamW, which reads four numbers of
        each parameter and writes three.
        """
        total, work, kernels = parameters.every, self.work, self.timer.kernels
        numbers, machine = total.trained_stored * work.master, self.machine
        copied = kernels.moved(total.here * (work.master + work.compute)) * (work.master != work.compute)
        if work.offload:
            moved = (total.trained_stored * work.reduce + numbers) / machine.host
            return moved + 10 * numbers / machine.host + copied
        return kernels.moved(10 * numbers) + copied
