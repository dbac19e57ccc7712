"""Run a pipeline whose stages sleep instead of computing, to measure a schedule on local ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trilith.parallel_state import Layout, ParallelState
from trilith.pipeline.driver import Pipeline, StageModule
from trilith.pipeline.relay import Travels
from trilith.pipeline.schedule_actions import Action, Kind, actions
from trilith.pipeline.timetable import UNIT_COSTS, Timed, Timetable
from trilith.ranks.pool import run_parallel

_Note = Callable[[Kind], None]


def measured_timetable(
    name: str, layout: Layout, micro_batches: int, *, unit: float = 0.05, timeout: float = 300
) -> Timetable:
    """Measure a step of torch's schedule on ``layout.pipeline`` local processes; a first step does not count.

    A stage sleeps ``unit`` seconds in forward, and as long for each half of its backward. Times are seconds
    from the first start; time that is not slept, such as sending and autograd, counts as waiting.
    """
    ranks = run_parallel(
        slept_rank, layout.pipeline, name, layout, micro_batches, dict(UNIT_COSTS), unit, timeout=timeout
    )
    begin = min(start for rank in ranks for start, _ in rank.values())
    order = actions(name, layout.pipeline, layout.virtual_stages, layout.v_shape, micro_batches)
    return Timetable(
        layout, tuple(tuple(_timed(todo, record, begin)) for todo, record in zip(order, ranks, strict=True))
    )


def _timed(order: Sequence[Action], record: Record, begin: float) -> list[Timed]:
    """Return the timed actions; a whole backward is both halves, in the order that autograd takes."""
    timed = []
    for action in order:
        halves = "IW" if action.kind == "B" else action.kind
        starts, stops = zip(*(record[half, action.stage, action.micro_batch] for half in halves), strict=True)
        timed.append(Timed(action, min(starts) - begin, max(stops) - begin))
    return sorted(timed, key=lambda timed_action: timed_action.start)


#: Start and stop of each action, by kind, stage and micro-batch.
Record = dict[tuple[str, int, int], tuple[float, float]]


def slept_rank(
    name: str, layout: Layout, micro_batches: int, costs: Mapping[Kind, float], unit: float
) -> Record:
    """Run the schedule in a group of the pipeline's ranks; return this rank's actions with start and stop."""
    state = ParallelState.start(layout)
    numbers = layout.stages_of(state.at.pipeline)
    stages = [SleepingStage(number, costs, unit) for number in numbers]
    travels = Travels((1, 1), torch.float32)
    schedule = Pipeline(
        [StageModule(stage, [stage]) for stage in stages],
        lambda output, target: output.sum(),
        name=name,
        microbatches=micro_batches,
        travels=[travels] * (layout.stages + 1),
        state=state,
    )
    whole = torch.zeros(micro_batches, 1)
    for _ in range(2):
        for stage in stages:
            stage.records.clear()
        dist.barrier()
        schedule.step(
            *((whole,) if 0 in numbers else ()), target=whole if layout.stages - 1 in numbers else None
        )
    return {key: times for stage in stages for key, times in stage.records.items()}


class SleepingStage(nn.Module):
    """Return its input unchanged. It sleeps in forward, for its input's gradient, and for its weight's."""

    def __init__(self, number: int, costs: Mapping[Kind, float], unit: float) -> None:
        super().__init__()
        self.number, self.costs, self.unit = number, costs, unit
        self.weight = nn.Parameter(torch.zeros(1))
        self.records: Record = {}

    def forward(self, x: Tensor) -> Tensor:
        self._sleep("F")
        if not x.requires_grad:  # the model's input: its stage costs as much as the others
            x = x.detach().requires_grad_()
        return _sleeps(x, self._sleep, "I") + _sleeps(self.weight, self._sleep, "W")

    def _sleep(self, kind: Kind) -> None:
        number = sum(recorded == kind for recorded, _, _ in self.records)  # they come in order
        start = time.monotonic()
        time.sleep(self.costs[kind] * self.unit)
        self.records[kind, self.number, number] = (start, time.monotonic())


class _Sleeps(torch.autograd.Function):
    """Return the input unchanged, and sleep in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: _Note, kind: Kind) -> Tensor:
        ctx.sleep, ctx.kind = sleep, kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.sleep(ctx.kind)
        return grads[0].clone(memory_format=torch.contiguous_format), None, None


_sleeps: Callable[[Tensor, _Note, Kind], Tensor] = _Sleeps.apply  # torch declares it without types
