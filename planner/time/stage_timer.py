"""Time a pipeline stage for one micro-batch: what it computes, and the exchanges that it waits for.

Each operator of a trace takes the larger of two times: its FLOPs at the rate that its kind reaches, and the
bytes that it reads and writes at the memory's rate. Where blocks are compiled, a chain of pointwise operators
is one kernel. Operators are started by the host one after the other; a GPU's work waits for that only where
it is shorter, and a CPU does both in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ...layers import Checkpointing
from ...pipeline.schedule_actions import Kind
from ...simulation.ledger import Collective
from ...simulation.recorder import Operator
from ...simulation.trace import Piece, Trace
from ...simulation.without_numbers import DTYPES
from ..rank_parameters import Group, RankParameters
from ..remembered import remembered
from ..stage_costs import StageCost
from ..step_shape import Work
from .collectives import Links
from .machines import Machine

#: How the operators of blocks run: one at a time on a CPU or a GPU, or fused by a compiler on a GPU.
Mode = Literal["cpu", "eager", "compiled"]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Hold the seconds of a forward, and of a backward's two parts: gradients of inputs, and of weights.

    ``again``: those in which a backward computes the forward again. ``attention``: of forward and backward
    those in kernels of attention.
    """

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    again: float = 0.0
    attention: tuple[float, float] = (0.0, 0.0)


class Kernels:
    """Time the traced pieces of one rank's share of a model on a machine.

    ``dtype`` names the peak of products. In float8 it is that of float8's own products; all others, and
    attention, are computed in 16 bits.
    """

    def __init__(self, machine: Machine, mode: Mode, dtype: str) -> None:
        self.machine, self.mode = machine, mode
        reached, wide = machine.efficiency, "bfloat16" if dtype == "float8" else dtype
        self._products = machine.peak(wide) * reached.products
        self._float8 = machine.peak(dtype) * reached.products
        self._attention = machine.peak(wide) * reached.attention
        self._memory = machine.bandwidth * reached.memory

    def moved(self, size: float) -> float:
        """Return the seconds in which this many bytes are read or written."""
        return size / self._memory

    def compute(self, trace: Trace, mode: Checkpointing = "none", *, compiled: bool = False) -> Seconds:
        """Time the forward and the backward of a trace.

        ``compiled``: whether a compiler fuses its operators, if it does those of blocks. ``mode``: the
        activation checkpointing that it is a trace of.
        """
        fused = compiled and self.mode == "compiled"
        parts: dict[str, list[Operator]] = {"forward": [], "again": [], "inputs": [], "weights": []}
        for operator in trace.operators:
            if not fused or operator.fused is not None:
                backward = "weights" if operator.gradient else "inputs"
                parts[backward if operator.phase == "backward" else operator.phase].append(operator)
        launch, host = self.machine.efficiency.launch, self.machine.efficiency.again.get(mode)
        seconds = {name: self._all(operators, launch, fused=fused) for name, operators in parts.items()}
        if host is not None and not self.machine.asynchronous:
            # A CPU's host has more to do than to start operators; a GPU has other work meanwhile.
            again, launched = self._work(parts["again"]), len(parts["again"]) * launch
            seconds["again"] = again + max(launched, len(parts["forward"]) * host)
        forward, back = (
            self._work(operator for operator in parts[name] if _attends(operator))
            for name in ("forward", "inputs")
        )
        return Seconds(**seconds, attention=(forward, back))

    def _all(self, operators: list[Operator], launch: float, *, fused: bool) -> float:
        work, launched = self._work(operators, fused=fused), len(operators) * launch
        return max(work, launched) if self.machine.asynchronous else work + launched

    def _work(self, operators: Iterable[Operator], *, fused: bool = False) -> float:
        seconds = 0.0
        for operator in operators:
            moved = operator.fused if fused else operator.moved
            seconds += max(self._multiplying(operator), (moved or 0) / self._memory)
        return seconds

    def _multiplying(self, operator: Operator) -> float:
        if _attends(operator):
            return operator.flops / (2 if operator.causal else 1) / self._attention
        return operator.flops / (self._float8 if "scaled" in operator.name else self._products)


def _attends(operator: Operator) -> bool:
    return bool(operator.flops) and "attention" in operator.name


_DIRECTIONS = ("forward", "inputs", "weights")


class StageSeconds(dict[tuple[str, str], float]):
    """Add up the seconds of a stage for one micro-batch by direction and by what they are spent on: those of
    the forward, and of a backward's two parts, for the gradients of inputs and of weights.

    ``seconds``, ``costs`` and ``parts`` are computed once: read them after the last ``add``.
    """

    def add(self, part: str, times: int = 1, /, **directions: float) -> None:
        """Add the seconds of a part in each direction that is named, ``times`` times."""
        for direction, seconds in directions.items():
            self[direction, part] = self.get((direction, part), 0.0) + seconds * times

    def include(self, other: StageSeconds, times: int = 1) -> StageSeconds:
        """Add the seconds of ``times`` modules that take as long as ``other`` each, and return the sum."""
        for key, seconds in other.items():
            self[key] = self.get(key, 0.0) + seconds * times
        return self

    def of(self, direction: str) -> dict[str, float]:
        return {part: seconds for (way, part), seconds in self.items() if way == direction}

    @property
    def seconds(self) -> float:
        return self.costs["F"] + self.costs["B"]

    @cached_property
    def costs(self) -> dict[Kind, float]:
        forward, inputs, weights = (sum(self.of(direction).values()) for direction in _DIRECTIONS)
        return {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}

    @cached_property
    def parts(self) -> dict[str, float]:
        parts: dict[str, float] = {}
        for direction in _DIRECTIONS:
            for part, seconds in self.of(direction).items():
                parts[part] = parts.get(part, 0.0) + seconds
        return parts

    @property
    def computed(self) -> tuple[float, float]:
        """Return the seconds in which a block's forward and its backward compute."""
        back = self["inputs", "compute"] + self["weights", "compute"] + self.get(("inputs", "recompute"), 0.0)
        return self["forward", "compute"], back


class StageTimer:
    """Time the stages of a model on a machine, without what its data ranks exchange, in all layouts of as
    many ranks that cut a block like that of ``work``.

    What was timed is remembered, so one serves a whole search. ``compiled``: whether blocks are fused by a
    compiler; ``dtype``: that of products, if it is not the dtype of forward and backward.
    """

    def __init__(self, work: Work, machine: Machine, *, compiled: bool = False, dtype: str = "") -> None:
        self.dtype = dtype or str(DTYPES[work.compute]).removeprefix("torch.")
        mode: Mode = "compiled" if compiled else "eager" if work.fused else "cpu"
        self.kernels, self.links = Kernels(machine, mode, self.dtype), Links(work.layout, machine)
        self._stages: dict[object, StageSeconds] = {}

    def stage(
        self, stage: StageCost, work: Work, parameters: RankParameters, root: Group | None
    ) -> StageSeconds:
        """Return the seconds of a stage. ``root``: those parameters of its rank that are in no block, if they
        count with this stage; a rank of a V has those of both ends.
        """
        trained = root and root.trained
        key = stage, work.checkpointing, work.checkpoint_every, work.micro_batches > 1, trained
        if key not in self._stages:
            self._stages[key] = self._of_stage(stage, work, parameters, root)
        return self._stages[key]

    def _of_stage(
        self, stage: StageCost, work: Work, parameters: RankParameters, root: Group | None
    ) -> StageSeconds:
        seconds = StageSeconds()
        for blocks in stage.alike(work.checkpointing, work.checkpoint_every):
            seconds.include(self.block(*blocks[2:]), blocks.blocks)
            self._accumulate(seconds, work, parameters.group(blocks.number), blocks.blocks)
        for piece in stage.beside:
            seconds.include(self._beside(piece))
        if stage.loss is not None:
            seconds.include(self._loss(stage.loss))
        for group, count in (*([] if root is None else [(root, 1)]), *in_one_piece(stage, parameters)):
            self._accumulate(seconds, work, group, count)
        return seconds

    @remembered
    def block(self, piece: Piece, mode: Checkpointing, reached: bool) -> StageSeconds:
        """Return the seconds of one block; ``reached``: whether a backward comes to it."""
        seconds = StageSeconds()
        self._module(seconds, piece, reached=reached, mode=mode, block=True)
        if mode != "none" and reached:
            recomputation = self.kernels.compute(piece.under(mode), mode, compiled=True).again
            seconds.add("recompute", inputs=recomputation)
            for send in piece.sends(mode, again=True):
                if send.axis != "expert":
                    seconds.add(send.axis, inputs=self._send(send, mode))
        if size := exchanged(piece):
            exchange = 2 * self.links.seconds("expert", "all_to_all", size, 1)
            seconds.add("expert", forward=exchange)
            if reached:
                seconds.add("expert", inputs=exchange * (1 if mode in ("none", "selective") else 2))
        return seconds

    def _module(
        self,
        stage_seconds: StageSeconds,
        piece: Piece,
        *,
        reached: bool = True,
        mode: Checkpointing = "none",
        block: bool = False,
    ) -> None:
        """Add what a piece computes and sends. ``block``: whether it is a block, which may be compiled."""
        computed = self._compute(stage_seconds, piece, compiled=block)
        scores, scores_back = computed.attention
        hiding = computed.weights / 2
        for send, count in Counter(piece.sends()).items():
            if send.axis == "expert" or (not reached and send.phase == "backward"):
                continue
            forward, seconds = send.phase == "forward", self._send(send, mode, count)
            if send.kind == "exchange":
                seconds = self.links.exposed(seconds, scores if forward else scores_back)
            elif send.axis == "tensor" and not forward and send.kind != "all_gather":
                exposed = self.links.exposed(seconds, hiding)
                hiding, seconds = hiding - (seconds - exposed), exposed
            stage_seconds.add(send.axis, **{"forward" if forward else "inputs": seconds})

    def _compute(self, stage_seconds: StageSeconds, piece: Piece, *, compiled: bool) -> Seconds:
        """Add the seconds in which a piece computes, and return them."""
        spent = self.kernels.compute(piece.plain, compiled=compiled)
        stage_seconds.add("compute", forward=spent.forward, inputs=spent.inputs, weights=spent.weights)
        return spent

    def _send(self, send: Collective, mode: Checkpointing = "none", count: int = 1) -> float:
        return self.links.seconds(send.axis, send.kind, count * send.bytes, count, mode)

    @remembered
    def _beside(self, piece: Piece) -> StageSeconds:
        seconds = StageSeconds()
        self._module(seconds, piece)
        return seconds

    @remembered
    def _loss(self, loss: Piece) -> StageSeconds:
        seconds = StageSeconds()
        self._compute(seconds, loss, compiled=True)
        for send in loss.sends():
            seconds.add(send.axis, forward=self._send(send))
        return seconds

    def _accumulate(self, seconds: StageSeconds, work: Work, group: Group, times: int) -> None:
        """Add the sum of a micro-batch's gradients, made in the dtype of the products, and those before."""
        if work.compute != work.reduce or work.micro_batches > 1:
            reads = work.compute + work.reduce * (1 + (work.micro_batches > 1))
            seconds.add("compute", times, weights=self.kernels.moved(group.trained * reads))


def exchanged(piece: Piece) -> int:
    """Return the bytes that a rank gives to one exchange of tokens between experts, if they are used evenly.

    A block exchanges them twice in forward and twice in backward: to the experts and back. Before the first
    it exchanges how many they are, which are fewer bytes.
    """
    return max((send.bytes for send in piece.sends() if send.axis == "expert"), default=0)


def in_one_piece(stage: StageCost, parameters: RankParameters) -> tuple[tuple[Group, int], ...]:
    """Return the blocks of a stage that is one piece, a user's module's: all of a rank with its first one."""
    return parameters.blocks if not stage.blocks and stage.leads else ()
