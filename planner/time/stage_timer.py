"""Time a pipeline stage for one micro-batch: what it computes, and the exchanges that it waits for."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ...layers import Checkpointing
from ...pipeline import schedule_kind
from ...simulation.piece import Piece
from ...simulation.record import Collective
from ..gathers_and_sums import root_stays, sums, sums_of_replicas
from ..rank_parameters import Group, RankParameters
from ..sampled_model import SampledModel
from ..sampled_module import Traced
from ..stage_costs import Alike, StageCost
from ..step_shape import Work
from .collectives import Links
from .exchange import Exchange
from .kernels import Kernels, Seconds, exchanged
from .stage_seconds import StageSeconds


@dataclass(frozen=True)
class _Block:
    """Hold the seconds of a block, without the data ranks; ``forward`` and ``back`` are those computed."""

    seconds: StageSeconds = field(default_factory=StageSeconds)
    forward: float = 0.0
    back: float = 0.0


class Computed(NamedTuple):
    """State a block's number, how many are like it, and the seconds in which its forward and its backward
    compute; ``reached``: whether a backward comes to it.
    """

    number: int
    alike: int
    forward: float
    back: float
    reached: bool


class StageTimer:
    """Time the stages of one model in one layout; ``work`` is that of any of its ranks.

    ``known``: the seconds of blocks that were timed before on the same machine; new ones are added. They
    depend neither on the data ranks nor on the pipeline.
    """

    def __init__(
        self,
        model: SampledModel | Traced,
        work: Work,
        kernels: Kernels,
        links: Links,
        known: dict[Any, Any],
    ) -> None:
        self.model, self.work, self.layout = model, work, work.layout
        self.kernels, self.links = kernels, links
        self._blocks: dict[object, _Block] = known
        self._exchanges: dict[object, Exchange] = known
        self._seconds: dict[object, Seconds] = known
        self._stages: dict[object, StageSeconds] = {}

    def stage(self, stage: StageCost, parameters: Callable[[], RankParameters]) -> StageSeconds:
        """Return the seconds of a stage without what data ranks exchange; stages alike share one object."""
        blocks = stage.alike(self.work.checkpointing, self.work.checkpoint_every)
        # The sampled model holds each piece as long as it lives, so that no other object takes its id.
        kinds = tuple((id(alike.piece), alike.forgets, alike.reached, alike.count) for alike in blocks)
        key = kinds, id(stage.beside), stage.first, stage.loss is not None
        if key not in self._stages:
            self._stages[key] = self._of_stage(stage, blocks, parameters)
        return self._stages[key]

    def _of_stage(
        self, stage: StageCost, blocks: list[Alike], parameters: Callable[[], RankParameters]
    ) -> StageSeconds:
        stage_seconds = StageSeconds()
        for alike in blocks:
            stage_seconds.include(self._block(alike).seconds, alike.count)
            self._accumulate(stage_seconds, self.model.group(alike.number, self.work.state), alike.count)
        for piece in stage.beside.parts:
            self._module(stage_seconds, piece)
        if stage.loss is not None:
            self._loss(stage_seconds, stage.loss)
        if self._has_root(stage):
            self._accumulate(stage_seconds, parameters().root, 1)
        for group, count in self._in_one_piece(stage, parameters):
            self._accumulate(stage_seconds, group, count)
        return stage_seconds

    def _in_one_piece(
        self, stage: StageCost, parameters: Callable[[], RankParameters]
    ) -> tuple[tuple[Group, int], ...]:
        """Return the blocks of a stage that is one piece, a user's module's; with the rank's first one."""
        first = not stage.blocks and stage.leads
        return parameters().blocks if first else ()

    def exchanging(
        self, alone: StageSeconds, stage: StageCost, parameters: Callable[[], RankParameters]
    ) -> StageSeconds:
        """Return the seconds of a stage that takes ``alone`` without what the data ranks exchange at every
        micro-batch, from ZeRO 2 on.
        """
        stage_seconds, state = alone.copy(), self.work.state
        exchanges = [
            (
                self.around(
                    self.model.group(block.number, state), block.forward, block.back, reached=block.reached
                ),
                block.alike,
            )
            for block in self.blocks(stage)
        ]
        if self._has_root(stage):
            exchanges.append((self.around(parameters().root, 0.0, 0.0, root=True), 1))
        pieces = self._in_one_piece(stage, parameters)
        count = sum(number for _, number in pieces)
        for group, number in pieces:  # each beside its share of what the stage computes
            share = alone.costs["F"] / count, alone.costs["B"] / count
            exchanges.append((self.around(group, *share), number))
        for (forward, inputs, weights), count in exchanges:
            stage_seconds.add("forward", "data", forward, count)
            stage_seconds.add("inputs", "data", inputs, count)
            stage_seconds.add("weights", "data", weights, count)
        return stage_seconds

    def blocks(self, stage: StageCost) -> list[Computed]:
        """Return how long one block of each kind computes."""
        blocks = []
        for alike in stage.alike(self.work.checkpointing, self.work.checkpoint_every):
            block = self._block(alike)
            blocks.append(Computed(alike.number, alike.count, block.forward, block.back, alike.reached))
        return blocks

    def _has_root(self, stage: StageCost) -> bool:
        """Tell whether the parameters that are in no block count with this stage: once on a rank."""
        apart = self.layout.rank_of_stage(self.layout.stages - 1) != 0
        return stage.first or (stage.loss is not None and apart)

    def _block(self, alike: Alike) -> _Block:
        mode = self.work.checkpointing if alike.forgets else "none"
        key = id(alike.piece), alike.forgets, alike.reached, mode, self.kernels.mode
        if key not in self._blocks:
            self._blocks[key] = self._of_block(alike)
        return self._blocks[key]

    def _of_block(self, alike: Alike) -> _Block:
        work, layout, piece = self.work, self.layout, alike.piece
        block_seconds, block = StageSeconds(), self.model.block(alike.number)
        mode = work.checkpointing if alike.forgets else "none"
        computed = self._module(block_seconds, piece, reached=alike.reached, mode=mode, block=True)
        back = computed.inputs + computed.weights
        if alike.forgets and alike.reached:
            again = self.kernels.compute(piece.under(mode), mode, compiled=True).again
            block_seconds.add("inputs", "recompute", again)
            back += again
            for send in piece.sends(mode, again=True):
                if send.axis != "expert":
                    block_seconds.add("inputs", send.axis, self._send(send, mode))
        if layout.expert > 1:
            size = exchanged(block, work.whole)
            seconds = 2 * self.links.seconds("expert", "all_to_all", size, 1)
            block_seconds.add("forward", "expert", seconds)
            if alike.reached:
                twice = alike.forgets and work.checkpointing != "selective"
                block_seconds.add("inputs", "expert", seconds * (2 if twice else 1))
        return _Block(block_seconds, computed.forward, back)

    def _module(
        self,
        stage_seconds: StageSeconds,
        piece: Piece,
        *,
        reached: bool = True,
        mode: Checkpointing = "none",
        block: bool = False,
    ) -> Seconds:
        """Add what a piece computes and sends; return the seconds computed. ``block``: whether it is a block,
        which may be compiled.
        """
        computed = self._computed(piece, compiled=block)
        stage_seconds.add("forward", "compute", computed.forward)
        stage_seconds.add("inputs", "compute", computed.inputs)
        stage_seconds.add("weights", "compute", computed.weights)
        scores, scores_back = computed.attention
        beside = computed.weights / 2
        for send, count in Counter(piece.sends()).items():
            if send.axis == "expert" or (not reached and send.phase == "backward"):
                continue
            forward, seconds = send.phase == "forward", self._send(send, mode, count)
            hides = send.kind == "exchange" or (
                send.axis == "tensor" and not forward and send.kind != "all_gather"
            )
            if hides and send.axis == "tensor":
                left = self.links.exposed(seconds, beside)
                beside, seconds = beside - (seconds - left), left
            elif hides:
                seconds = self.links.exposed(seconds, scores if forward else scores_back)
            stage_seconds.add("forward" if forward else "inputs", send.axis, seconds)
        return computed

    def _computed(self, piece: Piece, *, compiled: bool) -> Seconds:
        """Return the seconds in which a piece computes; many stages ask for the same one."""
        key = "computed", id(piece), compiled, self.kernels.mode
        if key not in self._seconds:
            self._seconds[key] = self.kernels.compute(piece.plain, compiled=compiled)
        return self._seconds[key]

    def _send(self, send: Collective, mode: Checkpointing = "none", count: int = 1) -> float:
        return self.links.seconds(send.axis, send.kind, count * send.bytes, count, mode)

    def _loss(self, stage_seconds: StageSeconds, loss: Piece) -> None:
        computed = self._computed(loss, compiled=True)
        stage_seconds.add("forward", "compute", computed.forward)
        stage_seconds.add("inputs", "compute", computed.inputs)
        stage_seconds.add("weights", "compute", computed.weights)
        for send in loss.sends():
            stage_seconds.add("forward", send.axis, self._send(send))

    def _accumulate(self, stage_seconds: StageSeconds, group: Group, times: int) -> None:
        """Add the sum of a micro-batch's gradients, made in the dtype of the products, and those before."""
        work = self.work
        if work.compute != work.reduce or work.micro_batches > 1:
            reads = work.compute + work.reduce * (1 + (work.micro_batches > 1))
            stage_seconds.add("weights", "compute", self.kernels.moved(group.trained * reads), times)

    def around(
        self, group: Group, forward: float, backward: float, *, root: bool = False, reached: bool = True
    ) -> tuple[float, float, float]:
        """Return the exposed seconds of what FSDP exchanges for a group at every micro-batch."""
        gathers, replicas = self._rounds[root]
        return self.exchange(group).around(
            forward, backward, self.links,
            zero=self.layout.zero, apart=self.in_two, replicas=replicas, gathers=gathers * reached,
        )  # fmt: skip

    @cached_property
    def in_two(self) -> bool:
        """Tell whether a backward has two parts."""
        return self.layout.pipeline > 1 and schedule_kind(self.work.schedule).two_backwards

    @cached_property
    def _rounds(self) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return, for a block and for the root, the gathers in a backward, and the share of the sums that the
        replicas sum too.
        """
        work, scatters = self.work, sums(self.work)
        share = {root: sums_of_replicas(work, root=root) / scatters for root in (False, True)}
        return (1, share[False]), (int(not root_stays(work)), share[True])

    def exchange(self, group: Group) -> Exchange:
        """Return the seconds of a group's exchanges over the data ranks."""
        key = self._place, id(group)  # the sampled model and ``parameters`` hold each group
        if key not in self._exchanges:
            exchange = self._exchanged("data", "replicas", group.padded, group.trained_padded)
            if group.apart:
                apart = self._exchanged("expert data", "expert replicas", group.apart, group.trained_apart)
                exchange = Exchange(*map(sum, zip(exchange, apart, strict=True)))
            self._exchanges[key] = exchange
        return self._exchanges[key]

    def _exchanged(self, data: str, replicas: str, padded: int, trained: int) -> Exchange:
        """Return the seconds of pieces of these sizes over two axes: ranks with shards, and replicas."""
        work, seconds, piece = self.work, self.links.seconds, trained * self.work.reduce
        shards = self.links.place(data).ranks
        exchange = Exchange(
            seconds(data, "all_gather", padded * work.compute),
            seconds(data, "reduce_scatter", shards * piece),
            seconds(replicas, "all_reduce", piece),
        )
        if shards == 1 or self.links.machine.efficiency.groups:  # which are measured with these copies
            return exchange
        unpacking = self.kernels.moved(2 * shards * padded * work.compute)
        packing = self.kernels.moved(shards * trained * (work.compute + work.reduce))
        return exchange._replace(unpacking=unpacking, packing=packing)

    @cached_property
    def _place(self) -> tuple[object, ...]:
        """Return what the places of the data ranks follow from."""
        return self.layout.tensor, self.layout.data_sizes(), self.layout.data_sizes(experts=True)
