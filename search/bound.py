"""Compute lower bounds of the time of layouts, cheaply: from the time of one row, by closed formulas."""

from __future__ import annotations

from functools import cache

from ..layers import Checkpointing
from ..parallel_state import Layout
from ..pipeline import ScheduleName, bubble, schedule_kind
from ..planner.data_rounds import data_rounds
from ..planner.time.collectives import Links
from .candidates import Cut, Flow
from .choice import Choice
from .evaluate import Evaluator


class Bound:
    """Compute lower bounds for one request. A test holds that no layout takes less than its bound."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self._busiest = cache(self._busiest_rank)
        self._sizes = cache(self._of_layout)

    def of_cut(self, cut: Cut) -> float:
        """Return a lower bound, in seconds, for every layout with this cut."""
        return min(self.of_flow(cut, flow) for flow in cut.flows)

    def of_flow(self, cut: Cut, flow: Flow) -> float:
        """Return a lower bound, in seconds, for every mode of activation checkpointing.

        The mode "none" computes least, and the largest micro-batch is the most efficient one.
        """
        largest = max(one.micro_batch for one in cut.flows)
        row = self.evaluator.row_seconds(cut.layout, largest, "none", "1f1b")
        return self._pipeline(cut, flow, *row)

    def of_mode(self, cut: Cut, flow: Flow, mode: Checkpointing) -> float:
        """Return a lower bound, in seconds, for every store of this cut, flow and mode."""
        return self._pipeline(cut, flow, *self._row(cut, flow, mode))

    def of_choice(self, cut: Cut, flow: Flow, choice: Choice) -> float:
        """Return a lower bound, in seconds, for one layout, including the traffic of its data ranks."""
        row = self._row(cut, flow, choice.checkpointing)
        forward, backward = (self._share(cut, one) for one in row)
        return self._pipeline(cut, flow, *row) + self._exchanged(choice, forward, backward)

    def _row(self, cut: Cut, flow: Flow, mode: Checkpointing) -> tuple[float, float]:
        return self.evaluator.row_seconds(cut.layout, flow.micro_batch, mode, flow.schedule)

    def _share(self, cut: Cut, row: float) -> float:
        """Return the seconds that a pipeline rank takes for its part of a step, if stages are equal."""
        return row * self.evaluator.rows / cut.data / cut.layout.pipeline

    def _pipeline(self, cut: Cut, flow: Flow, forward: float, backward: float) -> float:
        pipeline = cut.layout.pipeline
        waits = _waits(flow.schedule, pipeline, flow.virtual_stages, flow.v_shape, flow.count)
        busiest = self._busiest(pipeline, flow.virtual_stages, flow.v_shape)
        # Where gradients of weights fill the gaps, they also fill some that unequal stages leave.
        fills = schedule_kind(flow.schedule).two_backwards
        return self._share(cut, forward + backward) * ((1 if fills else busiest) + waits)

    def _busiest_rank(self, pipeline: int, virtual: int, v_shape: bool) -> float:
        """Return the work of the busiest pipeline rank over the mean of all."""
        found = self.evaluator.cut(pipeline, virtual, v_shape)
        ranks = [sum(found.costs[n] for n in found.layout.stages_of(rank)) for rank in range(pipeline)]
        return max(ranks) * pipeline / sum(ranks)

    def _exchanged(self, choice: Choice, forward: float, backward: float) -> float:
        """Return seconds of what data ranks exchange in a step, as far as nothing hides it, and of the
        optimizer. ``forward``, ``backward``: of all micro-batches of a pipeline rank.
        """
        layout, found = choice.layout, 0.0
        summed, gathered, without_root, updated = self._sizes(layout)
        if not layout.holds_alone:
            rounds = choice.micro_batches(self.evaluator.rows)
            if layout.zero < 2:
                found = max(0.0, summed - backward)
            elif layout.zero == 2:
                found = max(0.0, rounds * summed - backward)
            else:
                again = data_rounds(self.evaluator.work(choice), root=True).backward
                found = max(0.0, rounds * gathered - forward)
                found += max(0.0, rounds * ((gathered if again else without_root) + summed) - backward)
        return found + updated

    def _of_layout(self, layout: Layout) -> tuple[float, float, float, float]:
        """Return seconds in which the data ranks sum all gradients, gather all weights, gather those of
        blocks alone, and update them.
        """
        machine, sizes = self.evaluator.request.machine, self.evaluator.sizes
        of_rank = self.evaluator.held(layout, 0)
        held, links = of_rank.every, Links(layout, machine)
        size = held.trained_padded * sizes["reduce"]
        summed = links.seconds("data", "reduce_scatter", layout.data_sizes()[1] * size)
        if layout.zero < 2 or layout.pipeline > 1:  # otherwise once a step: left out of a lower bound
            summed += links.seconds("replicas", "all_reduce", size)
        gathered, without_root = (
            links.seconds("data", "all_gather", numbers * sizes["compute"])
            for numbers in (held.padded, held.padded - of_rank.root.padded)
        )
        return summed, gathered, without_root, 10 * held.trained_stored * sizes["master"] / machine.bandwidth


@cache
def _waits(schedule: ScheduleName, pipeline: int, virtual: int, v_shape: bool, micro_batches: int) -> float:
    """Return the waiting of a pipeline rank as a share of its work, by formula."""
    if pipeline == 1:
        return 0.0
    layout = Layout.of(pipeline=pipeline, virtual_stages=virtual, v_shape=v_shape)
    waits = bubble(schedule, layout, micro_batches)
    return waits / (1 - waits)
