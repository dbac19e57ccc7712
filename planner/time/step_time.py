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
- pipeline: what stages send to each other is in the timetable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from ...layers import Cost, Send, checkpointed, cross_entropy_cost
from ...models import Family, ModelConfig
from ...parallel_state import ParallelState
from ...pipeline import schedule_kind
from ...pipeline.timetable import step_length
from ..data_rounds import data_rounds
from ..flops import TokenFlops, flops_per_token
from ..memory import MemoryPlan, memory_of
from ..rank_parameters import Group, RankParameters
from ..sampled import SampledModel
from ..stage_costs import StageCost
from ..step_shape import Work
from .collectives import Links
from .kernels import Kernels, Mode, Seconds, exchanged, heavier, leaves
from .machines import Machine
from .prediction import PARTS, StepTime
from .stage_seconds import StageSeconds


class StepTimer:
    """Time the steps of one model in one layout; ``work`` is that of any of its ranks.

    ``split``: blocks of each stage. ``compiled``: whether blocks are fused by a compiler.
    """

    def __init__(
        self,
        model: SampledModel,
        work: Work,
        machine: Machine,
        *,
        split: Sequence[int] | None = None,
        compiled: bool = False,
        dtype: str = "",
    ) -> None:
        self.model, self.machine, self.split = model, machine, split
        layout = work.layout
        self.layout, self.work = layout, work
        dtype = dtype or {2: "bfloat16", 4: "float32", 8: "float64"}[work.compute]
        self.dtype = dtype
        mode: Mode = "compiled" if compiled else "eager" if work.fused else "cpu"
        self.kernels = Kernels(machine, mode, dtype, layout.tensor)
        self.links = Links(layout, machine)
        states = [ParallelState.stand_in(layout, layout.first_rank(n)) for n in range(layout.pipeline)]
        self.works = [replace(work, state=state) for state in states]
        self.held = [model.parameters(state, split) for state in states]
        self.costs = [model.costs(one, split) for one in self.works]
        self._known: dict[object, StageSeconds] = {}

    def memory(self) -> list[MemoryPlan]:
        """Return the memory of the first rank of each pipeline rank."""
        return [memory_of(*one) for one in zip(self.works, self.held, self.costs, strict=True)]

    def time(self, *, checkpoint: float = 0.0) -> StepTime:
        """Predict a step. ``checkpoint``: seconds that saving adds to a step, on average."""
        layout, rounds = self.layout, self.work.micro_batches
        stages: dict[int, StageSeconds] = {}
        for held, costs in zip(self.held, self.costs, strict=True):
            stages |= {one.number: self._stage(one, held) for one in costs}
        ordered = [stages[number] for number in sorted(stages)]
        of_rank = [[stages[number] for number in layout.stages_of(n)] for n in range(layout.pipeline)]
        busy = [rounds * sum(sum(one.parts().values()) for one in some) for some in of_rank]
        slowest = max(range(layout.pipeline), key=lambda n: busy[n])
        costs_of, sending = [one.costs for one in ordered], 0.0
        parts = dict.fromkeys(PARTS, 0.0)
        for one in of_rank[slowest]:
            for name, seconds in one.parts().items():
                parts[name] += rounds * seconds
        if layout.pipeline > 1:
            sending = self.links.seconds("pipeline", "send", self.work.between_stages, 1)
            schedule = self.work.schedule
            alone = step_length(schedule, layout, rounds, costs_of, 0.0)
            parts["bubble"] = max(0.0, alone - busy[slowest])
            parts["pipeline"] = step_length(schedule, layout, rounds, costs_of, sending) - alone
        parts["data"] += max(self._sums(n, of_rank[n]) for n in range(layout.pipeline))
        parts["optimizer"] = max(map(self._update, self.held))
        parts["checkpoint"] = checkpoint
        flops = _flops(self.model.family, self.model.config, self.work.sequence_length)
        tokens = self.work.micro_batch * rounds * layout.data * self.work.sequence_length
        return StepTime(
            parts, tokens, layout.world, flops, self.machine.stated or self.machine.peak(self.dtype), busy,
            costs_of, sending, self.machine.efficiency.source,
        )  # fmt: skip

    def _stage(self, stage: StageCost, held: RankParameters) -> StageSeconds:
        """Time a micro-batch of one stage."""
        found, work = StageSeconds(), self.work
        kinds: dict[tuple[int, bool, bool], list[int]] = {}
        for number in stage.blocks:
            forgets = checkpointed(number, work.checkpointing, work.checkpoint_every)
            key = self.model.kinds[number], forgets, number in stage.reached
            kinds.setdefault(key, []).append(number)
        for (_, forgets, reached), numbers in kinds.items():
            group = held.groups[f"layers.{numbers[0]}"]
            block = self.model.block(numbers[0])
            self._block(found, stage.blocks[numbers[0]], block, group, forgets, reached, len(numbers))
        ends = 3 * (stage.number == 0) + 3 * (stage.loss is not None)
        self._module(found, stage.beside, ends, 1, reached=True)
        if stage.loss is not None:
            self._loss(found, stage.loss)
        home = self.layout.rank_of_stage
        if stage.number == 0 or (stage.loss is not None and home(stage.number) != home(0)):
            self._around(found, held.root, 0.0, 0.0, 1, root=True)
        return found

    def _block(
        self,
        found: StageSeconds,
        cost: Cost,
        block: nn.Module,
        group: Group,
        forgets: bool,
        reached: bool,
        times: int,
    ) -> None:
        work, layout = self.work, self.layout
        factors = heavier(block)
        computed = self._module(found, cost, leaves(block), times, reached=reached, factors=factors)
        back = computed.inputs + computed.weights if reached else 0.0
        if forgets and reached:
            again = self.kernels.again(cost, leaves(block), work.checkpointing, factors)
            found.add("inputs", "recompute", again, times)
            back += again
            for send in cost.sends:
                if send.again == "always" or (send.again == "full" and work.checkpointing != "selective"):
                    found.add("inputs", send.axis, self._send(send), times)
        if layout.expert > 1:
            size = exchanged(block, work.tokens.bytes(work.hidden))
            seconds = 2 * self.links.seconds("expert", "all_to_all", size, 1)
            found.add("forward", "expert", seconds, times)
            if reached:
                found.add(
                    "inputs",
                    "expert",
                    seconds * (2 if forgets and work.checkpointing != "selective" else 1),
                    times,
                )
        self._around(found, group, computed.forward, back, times)

    def _module(
        self,
        found: StageSeconds,
        cost: Cost,
        modules: int,
        times: int,
        *,
        reached: bool,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> Seconds:
        """Add what modules of this cost compute and send; return the seconds computed."""
        computed = self.kernels.compute(cost, modules, factors)
        found.add("forward", "compute", computed.forward, times)
        if reached:
            found.add("inputs", "compute", computed.inputs, times)
            found.add("weights", "compute", computed.weights, times)
        beside = {"tensor": computed.weights / 2, "context": self.kernels.scores(cost)}
        for send in cost.sends:
            if not send.forward and not reached:
                continue
            seconds = self._send(send)
            hides = send.kind == "exchange" or (
                send.axis == "tensor" and not send.forward and send.kind != "all_gather"
            )
            if hides:
                free = (
                    beside[send.axis]
                    if send.axis == "tensor"
                    else beside["context"] * (1 if send.forward else 2.5)
                )
                hidden = min(seconds, free)
                seconds -= hidden
                if send.axis == "tensor":
                    beside["tensor"] -= hidden
            found.add("forward" if send.forward else "inputs", send.axis, seconds, times)
        return computed

    def _send(self, send: Send) -> float:
        return self.links.seconds(send.axis, send.kind, send.bytes, send.count)

    def _loss(self, found: StageSeconds, cost: Cost) -> None:
        tokens, state = self.work.tokens, self.works[0].state
        logits = cross_entropy_cost(tokens, self.model.config.vocab_size, state=state).kept
        computed = self.kernels.loss(logits)
        found.add("forward", "compute", computed.forward)
        found.add("inputs", "compute", computed.inputs)
        if self.work.loss_chunk:  # each chunk adds to the sum of the weight's gradient
            chunks = tokens.count / min(self.work.loss_chunk, tokens.count)
            found.add("weights", "compute", self.kernels.moved(2 * chunks * cost.kept))
        for send in cost.sends:
            found.add("forward", send.axis, self._send(send))

    def _around(
        self,
        found: StageSeconds,
        group: Group,
        forward: float,
        backward: float,
        times: int,
        root: bool = False,
    ) -> None:
        """Add what FSDP exchanges at every micro-batch, where it takes longer than what runs beside it."""
        work, rounds = self.work, data_rounds(self.work, root=root)
        gather = self._gather(group) if self.layout.zero == 3 else 0.0
        again = gather * (rounds.backward > 0)
        apart = self.layout.pipeline > 1 and schedule_kind(work.schedule).two_backwards
        summed = 0.0
        if self.layout.zero >= 2:
            summed = self._scatter(group) + self._sum_replicas(group) * rounds.replicas / rounds.scatters
        found.add("forward", "data", max(0.0, gather - forward), times)
        found.add("inputs", "data", max(0.0, again + (0.0 if apart else summed) - backward), times)
        found.add("weights", "data", summed if apart else 0.0, times)
        # Gradients of a micro-batch, made in the dtype of the products, are added to those before.
        if work.compute != work.reduce or work.micro_batches > 1:
            reads = work.compute + work.reduce * (1 + (work.micro_batches > 1))
            found.add("weights", "compute", self.kernels.moved(group.trained * reads), times)

    def _gather(self, group: Group) -> float:
        return self.links.seconds("data", "all_gather", group.padded * self.work.compute)

    def _scatter(self, group: Group) -> float:
        size, shards = group.trained_padded * self.work.reduce, self.layout.data_sizes()[1]
        return self.links.seconds("data", "reduce_scatter", shards * size)

    def _sum_replicas(self, group: Group) -> float:
        return self.links.seconds("replicas", "all_reduce", group.trained_padded * self.work.reduce)

    def _reduce(self, group: Group) -> float:
        return self._scatter(group) + self._sum_replicas(group)

    def _sums(self, pipeline: int, stages: Sequence[StageSeconds]) -> float:
        """Return the exposed seconds of what ranks exchange once a step."""
        layout, held, work = self.layout, self.held[pipeline], self.work
        found = 0.0
        if not layout.holds_alone:
            groups = held.kinds
            if layout.zero in (1, 2):  # weights, beside the first forward
                every = sum(number * self._gather(one) for one, number in groups)
                first = self._gather(held.root)
                found += max(first, every - sum(one.total("forward") for one in stages))
            if layout.zero < 2:
                every = sum(number * self._reduce(one) for one, number in groups)
                last = self._reduce(held.root)
                backward = sum(one.total("inputs") + one.total("weights") for one in stages)
                apart = layout.pipeline > 1 and schedule_kind(work.schedule).two_backwards
                found += every if apart else max(last, every - backward)
        size = max(work.master, work.reduce)
        found += self.links.seconds("tensor", "all_reduce", held.every.partial * size)
        found += self.links.seconds("ends", "all_reduce", held.every.ends * size)
        return found + 3 * self.links.seconds("all", "all_reduce", 8)

    def _update(self, held: RankParameters) -> float:
        """Time clipping, which reads gradients twice and writes them, and AdamW, which reads four numbers of
        each parameter and writes three.
        """
        every, work, kernels = held.every, self.work, self.kernels
        numbers, machine = every.trained_stored * work.master, self.machine
        copied = kernels.moved(every.here * (work.master + work.compute)) * (work.master != work.compute)
        if work.offload:
            moved = (every.trained_stored * work.reduce + numbers) / machine.host
            return moved + 10 * numbers / machine.host + copied
        return kernels.moved(10 * numbers) + copied


@cache
def _flops(family: Family, config: ModelConfig, sequence_length: int) -> TokenFlops:
    return flops_per_token(family.on_meta(config), sequence_length)


def step_time(
    model: SampledModel, work: Work, machine: Machine, *, split: Sequence[int] | None = None, **options: Any
) -> StepTime:
    """Predict a step of ``model`` in the layout of ``work``; see ``StepTimer``."""
    return StepTimer(model, work, machine, split=split, **options).time()
