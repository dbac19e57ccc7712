"""Time a pipeline stage for one micro-batch: what it computes, and the exchanges that it waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...layers import Cost, Send, cross_entropy_cost
from ...pipeline import schedule_kind
from ..data_rounds import data_rounds
from ..rank_parameters import Group, RankParameters
from ..sampled import SampledModel
from ..stage_costs import Alike, StageCost
from ..step_shape import Work
from .collectives import Links
from .kernels import Kernels, Seconds, exchanged, heavier, leaves
from .stage_seconds import StageSeconds


@dataclass(frozen=True)
class _Block:
    """Hold the seconds of a block, without the data ranks; ``forward`` and ``back`` are those computed."""

    seconds: StageSeconds = field(default_factory=StageSeconds)
    forward: float = 0.0
    back: float = 0.0


class StageTimer:
    """Time the stages of one model in one layout; ``work`` is that of any of its ranks.

    ``known``: the seconds of blocks that were timed before on the same machine; new ones are added. They
    depend neither on the data ranks nor on the pipeline.
    """

    def __init__(
        self, model: SampledModel, work: Work, kernels: Kernels, links: Links, known: dict[Any, Any]
    ) -> None:
        self.model, self.work, self.layout = model, work, work.layout
        self.kernels, self.links = kernels, links
        self._blocks: dict[object, _Block] = known
        self._stages: dict[object, StageSeconds] = {}

    def stage(self, stage: StageCost, held: Callable[[], RankParameters]) -> StageSeconds:
        """Return the seconds of a stage. Stages that are alike share one object."""
        blocks = stage.alike(self.work.checkpointing, self.work.checkpoint_every)
        # The sampled model holds each cost as long as it lives, so that no other object takes its id.
        kinds = tuple((id(one.cost), one.forgets, one.reached, one.count) for one in blocks)
        key = kinds, id(stage.beside), stage.number == 0, stage.loss is not None
        if key not in self._stages:
            self._stages[key] = self._of_stage(stage, blocks, held())
        return self._stages[key]

    def _of_stage(self, stage: StageCost, blocks: list[Alike], held: RankParameters) -> StageSeconds:
        found = StageSeconds()
        for one in blocks:
            block = self._block(one)
            found.include(block.seconds, one.count)
            group = self.model.group(one.number, self.work.state)
            self._around(found, group, block.forward, block.back, one.count)
        ends = 3 * (stage.number == 0) + 3 * (stage.loss is not None)
        self._module(found, stage.beside, ends, reached=True)
        if stage.loss is not None:
            self._loss(found, stage.loss)
        home = self.layout.rank_of_stage
        if stage.number == 0 or (stage.loss is not None and home(stage.number) != home(0)):
            self._around(found, held.root, 0.0, 0.0, 1, root=True)
        return found

    def _block(self, one: Alike) -> _Block:
        mode = self.work.checkpointing if one.forgets else "none"
        key = id(one.cost), one.forgets, one.reached, mode, self.kernels.mode
        if key not in self._blocks:
            self._blocks[key] = self._of_block(one)
        return self._blocks[key]

    def _of_block(self, one: Alike) -> _Block:
        work, layout, cost = self.work, self.layout, one.cost
        found, block = StageSeconds(), self.model.block(one.number)
        factors = heavier(block)
        computed = self._module(found, cost, leaves(block), reached=one.reached, factors=factors)
        back = computed.inputs + computed.weights if one.reached else 0.0
        if one.forgets and one.reached:
            again = self.kernels.again(cost, leaves(block), work.checkpointing, factors)
            found.add("inputs", "recompute", again)
            back += again
            for send in cost.sends:
                if send.again == "always" or (send.again == "full" and work.checkpointing != "selective"):
                    found.add("inputs", send.axis, self._send(send))
        if layout.expert > 1:
            size = exchanged(block, work.tokens.bytes(work.hidden))
            seconds = 2 * self.links.seconds("expert", "all_to_all", size, 1)
            found.add("forward", "expert", seconds)
            if one.reached:
                twice = one.forgets and work.checkpointing != "selective"
                found.add("inputs", "expert", seconds * (2 if twice else 1))
        return _Block(found, computed.forward, back)

    def _module(
        self,
        found: StageSeconds,
        cost: Cost,
        modules: int,
        *,
        reached: bool,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> Seconds:
        """Add what modules of this cost compute and send; return the seconds computed."""
        computed = self.kernels.compute(cost, modules, factors)
        found.add("forward", "compute", computed.forward)
        if reached:
            found.add("inputs", "compute", computed.inputs)
            found.add("weights", "compute", computed.weights)
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
            found.add("forward" if send.forward else "inputs", send.axis, seconds)
        return computed

    def _send(self, send: Send) -> float:
        return self.links.seconds(send.axis, send.kind, send.bytes, send.count)

    def _loss(self, found: StageSeconds, cost: Cost) -> None:
        tokens, state = self.work.tokens, self.work.state
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
        gather = self.gather(group) if self.layout.zero == 3 else 0.0
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

    def gather(self, group: Group) -> float:
        """Return the seconds in which the data ranks gather a group's weights."""
        return self.links.seconds("data", "all_gather", group.padded * self.work.compute)

    def reduce(self, group: Group) -> float:
        """Return the seconds in which the data ranks and the replicas sum a group's gradients."""
        return self._scatter(group) + self._sum_replicas(group)

    def _scatter(self, group: Group) -> float:
        size, shards = group.trained_padded * self.work.reduce, self.layout.data_sizes()[1]
        return self.links.seconds("data", "reduce_scatter", shards * size)

    def _sum_replicas(self, group: Group) -> float:
        return self.links.seconds("replicas", "all_reduce", group.trained_padded * self.work.reduce)
