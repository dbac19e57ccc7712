"""Time what a pipeline rank does once a step: sums over ranks, clipping, and the optimizer."""

from __future__ import annotations

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

    def exchange(self, stages: Sequence[StageSeconds], held: RankParameters) -> float:
        """Return the exposed seconds of what a rank with these stages exchanges once a step."""
        layout, exposed, found = self.layout, self.links.exposed, 0.0
        if not layout.holds_alone and layout.zero < 3:
            every = [(self.timer.exchange(one), number) for one, number in held.kinds]
            root, _ = every[0]
            if layout.zero > 0:  # weights, beside the first forward
                forward = sum(one.costs["F"] for one in stages)
                found += max(root.gather, exposed(sum(one.gather * n for one, n in every), forward))
            if layout.zero < 2:
                sums = sum((one.scatter + one.replicas) * n for one, n in every)
                last = root.scatter + root.replicas
                backward = sum(one.costs["B"] for one in stages)
                found += sums if self.timer.in_two else max(last, exposed(sums, backward))
        return found + self._sums_of_all(held)

    def _sums_of_all(self, held: RankParameters) -> float:
        """Return the seconds of the sums of single parameters, and of numbers that all ranks sum."""
        key = "once", id(held), self.layout.pipeline, self.layout.world
        if key not in self._known:
            size, seconds = max(self.work.master, self.work.reduce), self.links.seconds
            found = seconds("tensor", "all_reduce", held.every.partial * size)
            found += seconds("ends", "all_reduce", held.every.ends * size)
            self._known[key] = found + 3 * seconds("all", "all_reduce", 8)
        once: float = self._known[key]
        return once

    def update(self, held: RankParameters) -> float:
        """Time clipping, which reads gradients twice and writes them, and AdamW, which reads four numbers of
        each parameter and writes three.
        """
        every, work, kernels = held.every, self.work, self.timer.kernels
        numbers, machine = every.trained_stored * work.master, self.machine
        copied = kernels.moved(every.here * (work.master + work.compute)) * (work.master != work.compute)
        if work.offload:
            moved = (every.trained_stored * work.reduce + numbers) / machine.host
            return moved + 10 * numbers / machine.host + copied
        return kernels.moved(10 * numbers) + copied
