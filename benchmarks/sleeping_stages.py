"""Run a pipeline whose stages sleep instead of computing, to measure a schedule on local ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trilith.layers import Stage
from trilith.parallel_state import Layout, ParallelState
from trilith.pipeline import Stages
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
    model = SleepingModel(state, costs, unit)
    sleepers = [module for module in model.modules() if isinstance(module, SleepingStage)]
    stages, samples = Stages(model, state, dtype=torch.float32), {"x": torch.zeros(micro_batches, 1)}
    stages.fit({"x": samples["x"][:1]})
    for _ in range(2):
        for sleeper in sleepers:
            sleeper.records.clear()
        dist.barrier()
        stages.train(samples, lambda output, _: output.sum(), schedule=name, micro_batch=1)
    return {key: times for sleeper in sleepers for key, times in sleeper.records.items()}


class SleepingModel(nn.Module):
    """Hold the stages of a rank."""

    first_input = "x"

    def __init__(self, state: ParallelState, costs: Mapping[Kind, float], unit: float) -> None:
        super().__init__()
        self.stage = Stage.of(state.layout.stages, state=state)
        numbers = [part.number for part in self.stage.parts]
        self.sleepers = nn.ModuleDict({str(number): SleepingStage(number, costs, unit) for number in numbers})

    def hidden_shape(self, x: Tensor) -> torch.Size:
        return x.shape

    def uses(self, stage: Stage) -> list[nn.Module]:
        return [self.sleepers[str(stage.number)]]

    def forward(self, hidden: Tensor, *, stage: Stage | None = None) -> Tensor:
        output: Tensor = self.sleepers[str((stage or self.stage).number)](hidden)
        return output


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
