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

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache

from ...parallel_state import Layout
from ...pipeline.schedule_actions import Kind
from ...pipeline.timetable import step_length
from ..planned_model import PlannedModel
from ..rank_parameters import Group, RankParameters
from ..stage_costs import StageCost, alike_ranks
from ..step_shape import Work
from .data_ranks import DataRanks
from .machines import Machine
from .prediction import PARTS, StepTime
from .stage_timer import StageSeconds, StageTimer, in_one_piece

#: By how much a sum is lowered that is compared with one of the same seconds in another order.
ROUNDED = 1 - 1e-12


class StepTimer:
    """Time the steps of one model in one layout; ``work`` is that of any of its ranks.

    ``split``: blocks of each stage. ``compiled``, ``dtype``: as for ``StageTimer``. A caller that times many
    steps gives what these share: ``timer``, ``alike`` (``alike_ranks``), and ``parameters`` and ``costs``,
    which return the parameters and costs of a pipeline rank.
    """

    def __init__(
        self,
        model: PlannedModel,
        work: Work,
        machine: Machine,
        *,
        split: Sequence[int] | None = None,
        compiled: bool = False,
        dtype: str = "",
        parameters: Callable[[int], RankParameters] | None = None,
        costs: Callable[[int], list[StageCost]] | None = None,
        timer: StageTimer | None = None,
        alike: list[int] | None = None,
    ) -> None:
        self.model, self.work, self.layout, self.machine = model, work, work.layout, machine
        self.timer = timer or StageTimer(work, machine, compiled=compiled, dtype=dtype)
        self.data_ranks = DataRanks(work, machine, self.timer.kernels)
        work_of = work.of_pipeline
        self.parameters = parameters or cache(lambda rank: model.parameters(work_of(rank).state, split))
        self.costs = costs or cache(lambda rank: model.costs(work_of(rank), split))
        self._alike = alike or alike_ranks(self.layout, self.costs)

    @cached_property
    def _of_rank(self) -> dict[int, list[StageSeconds]]:
        """Return the seconds of the stages of each pipeline rank that is like none before."""
        return {rank: [*self._stages_of(rank)] for rank in dict.fromkeys(self._alike)}

    def _stages_of(self, rank: int) -> Iterator[StageSeconds]:
        parameters, layout, timed = self.parameters(rank), self.layout, dict[object, StageSeconds]()
        for number, cost in zip(layout.stages_of(rank), self.costs(rank), strict=True):
            # The parameters that are in no block count once on a rank.
            counts = number == 0 or (cost.loss is not None and layout.rank_of_stage(number) != 0)
            if (cost, counts) not in timed:
                root = parameters.root if counts else None
                stage = self.timer.stage(cost, self.work, parameters, root)
                stage = self._exchanging(stage, cost, parameters, root) if layout.zero > 1 else stage
                timed[cost, counts] = stage
            yield timed[cost, counts]

    def _exchanging(
        self, alone: StageSeconds, stage: StageCost, parameters: RankParameters, root: Group | None
    ) -> StageSeconds:
        """Return the seconds of a stage that takes ``alone`` without what the data ranks exchange at every
        micro-batch, from ZeRO 2 on.
        """
        seconds, around = StageSeconds(alone), self.data_ranks.around
        for blocks in stage.alike(self.work.checkpointing, self.work.checkpoint_every):
            group, computed = parameters.group(blocks.number), self.timer.block(*blocks[2:]).computed
            seconds.add("data", blocks.blocks, **around(group, *computed, reached=blocks.reached))
        if root is not None:
            seconds.add("data", **around(root, 0.0, 0.0, root=True))
        pieces = in_one_piece(stage, parameters)
        count = sum(number for _, number in pieces)
        for group, number in pieces:  # each beside its share of what the stage computes
            share = alone.costs["F"] / count, alone.costs["B"] / count
            seconds.add("data", number, **around(group, *share))
        return seconds

    @cached_property
    def _stages(self) -> list[StageSeconds]:
        """Return the seconds of each stage, in the model's order."""
        stages: dict[int, StageSeconds] = {}
        for rank, model_rank in enumerate(self._alike):
            stages |= zip(self.layout.stages_of(rank), self._of_rank[model_rank], strict=True)
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
        return self.data_ranks.links.seconds("pipeline", "send", self.work.between_blocks, 1)

    def _with_messages(self) -> tuple[list[Mapping[Kind, float]], float]:
        """Return the seconds of each stage's actions, and those of a message that travels beside them.

        On a CPU no message does: an action takes longer by the one that another rank sends to it.
        """
        costs: list[Mapping[Kind, float]] = [stage.costs for stage in self._stages]
        if self.machine.asynchronous:
            return costs, self._sending
        home, longer = self.layout.rank_of_stage, list[Mapping[Kind, float]]()
        for stage, cost in enumerate(costs):
            forward = self._sending * (stage > 0 and home(stage - 1) != home(stage))
            back = self._sending * (stage + 1 < len(costs) and home(stage + 1) != home(stage))
            longer.append({**cost, "F": cost["F"] + forward, "I": cost["I"] + back, "B": cost["B"] + back})
        return longer, 0.0

    def time(self) -> StepTime:
        """Predict a step."""
        layout, work, busy, with_messages = self.layout, self.work, self._busy, self._with_messages()
        slowest = max(range(layout.pipeline), key=lambda n: busy[n])
        parts = dict.fromkeys(PARTS, 0.0)
        for stage in self._of_rank[self._alike[slowest]]:
            for name, seconds in stage.parts.items():
                parts[name] += work.micro_batches * seconds
        if layout.pipeline > 1:
            alone = self._length([stage.costs for stage in self._stages], 0.0)
            parts["bubble"] = max(0.0, alone * ROUNDED - busy[slowest])
            parts["pipeline"] = self._length(*with_messages) - alone
        once = self._once()
        for name, seconds in once.items():
            parts[name] += seconds
        tokens = work.micro_batch * work.micro_batches * layout.data * work.sequence_length
        return StepTime(
            parts, tokens, layout.world, self.model.flops(work.sequence_length),
            self.machine.stated or self.machine.peak(self.timer.dtype), busy, *with_messages,
            self.machine.efficiency.source, self._stages, once,
        )  # fmt: skip

    def _length(self, costs: Sequence[Mapping[Kind, float]], sending: float) -> float:
        """Return the seconds of the timetable, which layouts that differ in their data ranks may share."""
        layout, work = self.layout, self.work
        shape = Layout(pipeline=layout.pipeline, virtual_stages=layout.virtual_stages, v_shape=layout.v_shape)
        seconds = tuple(tuple(cost.items()) for cost in costs)
        return _length(work.schedule, shape, work.micro_batches, seconds, sending)

    def _once(self) -> dict[str, float]:
        """Return the exposed seconds of what ranks exchange once a step, and those of clipping and of the
        optimizer.
        """
        ranks = [(stages, self.parameters(rank)) for rank, stages in self._of_rank.items()]
        exchange = max(self.data_ranks.once(*rank) for rank in ranks)
        updates = (self.data_ranks.update(parameters) for _, parameters in ranks)
        return {"data": exchange, "optimizer": max(updates)}

    def least(self, of_stages: float | None = None) -> float:
        """Return a lower bound of the seconds of a step, computed without the timetable; ``of_stages``: what
        ``least_of_stages`` returns, where it is known.
        """
        once = self._once()
        return (of_stages or self.least_of_stages()[0]) + once["data"] + once["optimizer"]

    def least_of_stages(self) -> tuple[float, float]:
        """Return a lower bound of the seconds from the first forward to the last backward, and the most
        seconds in which a pipeline rank computes one micro-batch.

        A pipeline rank starts after the forward of the stages before its first one, and is then busy. If its
        last action is a whole backward, the backward of the stages before follows.
        """
        waits = least = 0.0
        for busy, model_rank in zip(self._busy, self._alike, strict=True):
            least = max(least, waits + busy)
            costs = self._of_rank[model_rank][0].costs
            back = 0.0 if self.work.in_two else costs["B"] + self._sending
            waits += costs["F"] + self._sending + back
        return least, max(self._busy) / self.work.micro_batches


@lru_cache(maxsize=4096)
def _length(
    schedule: str,
    shape: Layout,
    micro_batches: int,
    costs: tuple[tuple[tuple[Kind, float], ...], ...],
    sending: float,
) -> float:
    return step_length(schedule, shape, micro_batches, [dict(seconds) for seconds in costs], sending)
