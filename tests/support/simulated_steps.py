"""Run whole steps of one rank on the simulated device: forward, backward, clip, update, and count."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from trilith.checkpoints import begin_moments
from trilith.layers import Balancing, routers
from trilith.models import CausalLM
from trilith.parallel_state import ParallelState, clip_gradients
from trilith.planner.search.simulated_step import ledger_of_rank, simulated_steps
from trilith.recipes.section import LossScaleSection
from trilith.simulation.backend import NAME
from trilith.simulation.kernels import Kernels
from trilith.simulation.ledger import Ledger, StepRecord
from trilith.simulation.rank import simulated_rank
from trilith.simulation.waits import WAITS, Kind, Per
from trilith.system.process_end import leave
from trilith.training.step_sums import StepResult
from trilith.training.update import LossScale, Update

from support.short_training import Case, build_rank, rank_batch

#: Beginnings of the names of operators that make a tensor and start no kernel.
_ALLOCATE = ("aten::empty", "aten::new_empty")


@dataclass(frozen=True)
class StepCounts:
    """Hold what a step after the first asked of the device: see ``SimulatedDevice`` and ``Ledger``."""

    waited: Counter[tuple[str, Kind]]
    launches: Counter[str]
    moved: int

    @property
    def launched(self) -> int:
        return sum(self.launches.values())

    @property
    def waits(self) -> int:
        return sum(self.waited.values())


def step_counts(case: Case, rank: int = 0) -> StepCounts:
    """Run two steps of a rank and return the counts of the second.

    Raises ``Mixed``, ``NewWait``, and ``AssertionError`` for a place that waits too often for the list.
    """
    with simulated_rank(case.layout, rank, WAITS) as (state, device), Ledger(NAME) as ledger:
        parts = build_rank(case, state)
        model, optimizer = parts.model, parts.optimizer
        begin_moments(model, optimizer)
        scale = LossScale(LossScaleSection()) if case.compute == torch.float16 else None
        experts = Balancing(model, rate=1e-3, state=state) if [*routers(model)] else None
        update = Update(model, optimizer, clip=case.clip, loss_scale=scale, balancing=experts)
        for number in range(2):
            rows = rank_batch(case, number, state)
            device.waited.clear()
            ledger.clear()
            done = update(parts.step.launch(rows, scale=update.scale))
            assert done.skipped is None and not done.fatal
        started = [each for each in ledger.operators.values() if not each.name.startswith(_ALLOCATE)]
        launches = Counter[str]()
        for each in started:
            launches[each.name] += each.count
        counts = StepCounts(device.waited, launches, sum(each.moved for each in started))
        often = times(case, model)
        for wait in WAITS:
            found, most = counts.waited[wait.place, wait.kind], wait.most * often[wait.per]
            assert found <= most, f"{wait.place}: {found} waits ({wait.kind}), expected at most {most}"
    return counts


def times(case: Case, model: CausalLM) -> dict[Per, int]:
    """Return how often a step does what a wait may belong to, on this rank."""
    micro_batches = case.samples // case.layout.data // case.micro_batch
    again = 1 if case.memory.checkpointing == "none" else 2
    return {
        "step": 1,
        "micro-batch": micro_batches * len(model.stage.parts),
        "block": micro_batches * len(model.layers) * again,
        "parameter": micro_batches * len([*model.parameters()]),
        "outside": 0,
    }


def ledger_of(case: Case, rank: int = 0, kernels: Kernels = "cpu") -> StepRecord:
    """Return the record of a rank's first step; a later one holds a few sums more, 24 to 56 bytes."""
    batches = [rank_batch(case, 0, ParallelState.stand_in(case.layout, rank))]
    with ledger_of_rank(case.layout, rank, kernels) as (state, ledger):
        parts = build_rank(case, state)

        def update(result: StepResult) -> None:
            norm = clip_gradients(parts.model, case.clip, state=state)
            _ = float(result.loss), float(norm)
            parts.optimizer.step()
            parts.optimizer.zero_grad()

        return simulated_steps(ledger, parts.step, parts.optimizer, batches, update, kernels)


def write_peaks(cases: Sequence[tuple[Case, Sequence[int]]], file: Path) -> None:
    """Write the peak of each of the ranks of each case, and end the process."""
    peaks = [{rank: ledger_of(case, rank).peak for rank in ranks} for case, ranks in cases]
    file.write_text(json.dumps(peaks))
    leave(0)
