"""Compute lower bounds of the time of layouts, cheaply: without the timetables of their pipelines."""

from functools import cache

from ...layers import Checkpointing
from .candidates import Cut, Flow
from .choice import Choice
from .evaluate import Evaluator


class Bound:
    """Compute lower bounds for one request. A test holds that no layout takes less than its bound."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self._of_stages = cache(evaluator.least_of_stages)

    def of_cut(self, cut: Cut) -> float:
        """Return a lower bound, in seconds, for every layout with this cut: as if no pipeline rank waited."""
        alike = {(flow.micro_batch, flow.count): flow for flow in cut.flows}
        return min(self.of_rows(cut, flow) for flow in alike.values())

    def of_rows(self, cut: Cut, flow: Flow) -> float:
        """Return a lower bound, in seconds, for every schedule with these micro-batches."""
        once = flow.count == 1
        of_one = self.evaluator.whole_model(cut.layout, flow.micro_batch, once=once)
        return of_one * flow.count / cut.layout.pipeline

    def of_flow(self, cut: Cut, flow: Flow) -> float:
        """Return a lower bound, in seconds, for every mode of activation checkpointing: "none" computes
        least.
        """
        pipeline = cut.layout.pipeline
        compiled = any(self.evaluator.compiles(mode, flow.schedule, pipeline) for mode in flow.modes)
        return self._of_stages(cut.choice(flow, "none"), compiled)

    def of_mode(self, cut: Cut, flow: Flow, mode: Checkpointing) -> float:
        """Return a lower bound, in seconds, for every store of this cut, flow and mode."""
        compiled = self.evaluator.compiles(mode, flow.schedule, cut.layout.pipeline)
        return self._of_stages(cut.choice(flow, mode), compiled)

    def of_choice(self, choice: Choice) -> float:
        """Return a lower bound, in seconds, for one layout, including the traffic of its data ranks."""
        return self.evaluator.least(choice)
