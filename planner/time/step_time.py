"""Predict the seconds of a training step of any layout on any machine, by part.

Every pipeline stage is timed: its blocks and ends (``Kernels``), what they send (``Links``), what is computed
again. The schedule's own timetable with these unequal stages gives the idle time. Then come what the data
ranks exchange, the clipping and the optimizer.

Exposed is what nothing else is computed beside:

- tensor: sums and gathers stand between two products. The backward of a column-parallel product computes the
  gradient of its weights meanwhile.
- context: around a ring keys and values travel while others are used; gathered ones are waited for.
- experts: tokens are waited for.
- data: gathers of weights and sums of gradients run beside the blocks before and after, as far as these take
  long enough; with a pipeline the sums of ZeRO 0 and 1 come after the last micro-batch, where nothing hides
  them.
- pipeline: what stages send to each other is in the timetable. A CPU's rank computes nothing while it waits
  for a message or takes it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

from ...parallel_state import ParallelState
from ...pipeline.schedule_actions import Kind
from ...pipeline.timetable import step_length
from ...simulation.without_numbers import DTYPES
from ..memory import MemoryPlan, memory_of
from ..rank_parameters import RankParameters
from ..sampled_model import SampledModel
from ..sampled_module import Traced
from ..stage_costs import StageCost
from ..step_shape import Work
from .collectives import Links
from .kernels import Kernels, Mode
from .machines import Machine
from .once_a_step import OnceAStep
from .prediction import PARTS, StepTime
from .stage_seconds import StageSeconds
from .stage_timer import StageTimer

#: By how much a sum is lowered that is compared with one of the same seconds in another order.
_ROUNDED = 1 - 1e-12


class StepTimer:
    """Time the steps of one model in one layout; ``work`` is that of any of its ranks.

    ``split``: blocks of each stage. ``compiled``: whether blocks are fused by a compiler. A caller that times
    many steps gives what these share: ``parameters`` and ``costs`` return the parameters and costs of a
    pipeline rank; ``known`` holds seconds that were computed before on this machine, and new ones are added.
    """

    def __init__(
        self,
        model: SampledModel | Traced,
        work: Work,
        machine: Machine,
        *,
        split: Sequence[int] | None = None,
        compiled: bool = False,
        dtype: str = "",
        parameters: Callable[[int], RankParameters] | None = None,
        costs: Callable[[int], list[StageCost]] | None = None,
        known: dict[Any, Any] | None = None,
    ) -> None:
        self.model, self.machine, self.split = model, machine, split
        layout = work.layout
        self.layout, self.work = layout, work
        dtype = dtype or str(DTYPES[work.compute]).removeprefix("torch.")
        self.dtype = dtype
        mode: Mode = "compiled" if compiled else "eager" if work.fused else "cpu"
        self.kernels = Kernels(machine, mode, dtype)
        self.links = Links(layout, machine)
        self._known: dict[Any, Any] = {} if known is None else known
        self.timer = StageTimer(model, work, self.kernels, self.links, self._known)
        self.once = OnceAStep(self.timer, machine, self._known)
        self._exchanging: dict[int, StageSeconds] = {}
        self.parameters = parameters or cache(lambda rank: model.parameters(self._work_of(rank).state, split))
        self.costs = costs or cache(lambda rank: model.costs(self._work_of(rank), split))

    def _work_of(self, rank: int) -> Work:
        return replace(self.work, state=ParallelState.stand_in(self.layout, self.layout.first_rank(rank)))

    def memory(self) -> list[MemoryPlan]:
        """Return the memory of the first rank of each pipeline rank."""
        ranks = range(self.layout.pipeline)
        return [memory_of(self._work_of(rank), self.parameters(rank), self.costs(rank)) for rank in ranks]

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        """Return numbers that tell which pipeline ranks have stages alike."""
        checkpoint_every = self.work.checkpoint_every if self.work.checkpointing == "every" else 1
        return self.model.shapes(self.layout, self.split, checkpoint_every)

    @cached_property
    def _alike(self) -> list[int]:
        """Return, for each pipeline rank, the first one whose stages are like its stages."""
        first: dict[tuple[int, ...], int] = {}
        return [first.setdefault(shape, rank) for rank, shape in enumerate(self._shapes)]

    @cached_property
    def _of_rank(self) -> dict[int, list[StageSeconds]]:
        """Return the seconds of the stages of each pipeline rank that is like none before."""
        return {rank: self._of(rank) for rank in dict.fromkeys(self._alike)}

    def _of(self, rank: int) -> list[StageSeconds]:
        """Return the seconds of a pipeline rank's stages. Stages alike take as long in every layout that cuts
        a block so, but for what the data ranks exchange during a micro-batch.
        """
        numbers, parameters = self._shapes[rank], partial(self.parameters, rank)
        keys = [(self._timed_alike, number) for number in numbers]
        known, costs = self._known, self.costs(rank) if self.layout.zero > 1 else None
        if not all(key in known for key in keys):
            for key, cost in zip(keys, costs or self.costs(rank), strict=True):
                if key not in known:
                    known[key] = self.timer.stage(cost, parameters)
        if costs is None:
            return [known[key] for key in keys]
        for key, number, cost in zip(keys, numbers, costs, strict=True):
            if number not in self._exchanging:
                self._exchanging[number] = self.timer.exchanging(known[key], cost, parameters)
        return [self._exchanging[number] for number in numbers]

    @cached_property
    def _timed_alike(self) -> int:
        """Return a number for all that the seconds of a stage depend on, beside its shape and the data
        ranks; steps that share this have equal numbers.
        """
        work, known = self.work, self._known
        made = id(self.model), work.batch, work.checkpointing, work.loss_chunk, self.kernels.mode
        number: int = known.setdefault((*made, work.micro_batches > 1), len(known))
        return number

    @cached_property
    def _stages(self) -> list[StageSeconds]:
        """Return the seconds of each stage, in the model's order."""
        stages: dict[int, StageSeconds] = {}
        for rank, alike in enumerate(self._alike):
            stages |= zip(self.layout.stages_of(rank), self._of_rank[alike], strict=True)
        return [stages[number] for number in sorted(stages)]

    @cached_property
    def _busy(self) -> list[float]:
        """Return the seconds that each pipeline rank computes for micro-batches."""
        busy = {rank: sum(stage.seconds for stage in stages) for rank, stages in self._of_rank.items()}
        return [self.work.micro_batches * busy[rank] for rank in self._alike]

    @cached_property
    def _sending(self) -> float:
        """Return the seconds in which a stage's results reach the next one."""
        if self.layout.pipeline == 1:
            return 0.0
        return self.links.seconds("pipeline", "send", self.work.between_blocks, 1)

    @cached_property
    def _with_messages(self) -> tuple[list[Mapping[Kind, float]], float]:
        """Return the seconds of each stage's actions, and those of a message that travels beside them.

        On a CPU no message does: an action takes longer by the one that another rank sends to it.
        """
        costs: list[Mapping[Kind, float]] = [stage.costs for stage in self._stages]
        home = self.layout.rank_of_stage
        if self.machine.asynchronous:
            return costs, self._sending
        longer: list[Mapping[Kind, float]] = []
        for stage, cost in enumerate(costs):
            forward = self._sending * (stage > 0 and home(stage - 1) != home(stage))
            back = self._sending * (stage + 1 < len(costs) and home(stage + 1) != home(stage))
            longer.append({**cost, "F": cost["F"] + forward, "I": cost["I"] + back, "B": cost["B"] + back})
        return longer, 0.0

    def time(self, *, checkpoint: float = 0.0) -> StepTime:
        """Predict a step. ``checkpoint``: seconds that saving adds to a step, on average."""
        layout, rounds, busy = self.layout, self.work.micro_batches, self._busy
        slowest = max(range(layout.pipeline), key=lambda n: busy[n])
        parts = dict.fromkeys(PARTS, 0.0)
        for stage in self._of_rank[self._alike[slowest]]:
            for name, seconds in stage.parts.items():
                parts[name] += rounds * seconds
        costs_of = [stage.costs for stage in self._stages]
        if layout.pipeline > 1:
            alone = self._length(costs_of, 0.0)
            parts["bubble"] = max(0.0, alone * _ROUNDED - busy[slowest])
            parts["pipeline"] = self._length(*self._with_messages) - alone
        once = {"data": self._exchange, "optimizer": self._updates, "checkpoint": checkpoint}
        for name, seconds in once.items():
            parts[name] += seconds
        flops = self.model.flops(self.work.sequence_length)
        tokens = self.work.micro_batch * rounds * layout.data * self.work.sequence_length
        return StepTime(
            parts, tokens, layout.world, flops, self.machine.stated or self.machine.peak(self.dtype), busy,
            *self._with_messages, self.machine.efficiency.source, self._stages, once,
        )  # fmt: skip

    def least(self) -> float:
        """Return a lower bound of the seconds of a step, computed without the timetable."""
        return self.least_of_stages() + self._exchange + self._updates

    def least_of_stages(self) -> float:
        """Return a lower bound of the seconds from the first forward to the last backward.

        A pipeline rank starts after the forward of the stages before its first one, and is then busy. If its
        last action is a whole backward, the backward of the stages before follows.
        """
        if self.layout.zero > 1:
            return self._longest
        layout, work = self.layout, self.work
        key = self._timed_alike, layout.pipeline, layout.virtual_stages, work.schedule, work.micro_batches
        # Layouts that differ in their data ranks share it.
        return float(self._known.get(key) or self._known.setdefault(key, self._longest))

    @cached_property
    def _longest(self) -> float:
        """Return the bound of ``least_of_stages``."""
        waits = least = 0.0
        for busy, alike in zip(self._busy, self._alike, strict=True):
            least = max(least, waits + busy)
            costs = self._of_rank[alike][0].costs
            waits += costs["F"] + self._sending + (0.0 if self.timer.in_two else costs["B"] + self._sending)
        return least

    def _length(self, costs: Sequence[Mapping[Kind, float]], sending: float) -> float:
        """Return the seconds of the timetable; layouts that differ in their data ranks may share one."""
        layout, work = self.layout, self.work
        numbers = tuple((cost["F"], cost["I"], cost["W"]) for cost in costs)
        shape = layout.pipeline, layout.virtual_stages, layout.v_shape, work.micro_batches
        key = work.schedule, shape, numbers, sending
        if key not in self._known:
            self._known[key] = step_length(work.schedule, layout, work.micro_batches, costs, sending)
        length: float = self._known[key]
        return length

    @cached_property
    def _exchange(self) -> float:
        """Return the exposed seconds of what ranks exchange once a step."""
        return max(
            self.once.exchange(stages, self.parameters(rank)) for rank, stages in self._of_rank.items()
        )

    @cached_property
    def _updates(self) -> float:
        """Return the seconds of clipping and of the optimizer."""
        return max(self.once.update(self.parameters(rank)) for rank in self._of_rank)
