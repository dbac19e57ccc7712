"""Plan the memory of one rank in a step, by kind, at its worst instant.

FSDP2's own bytes a parameter, measured (bf16 compute, fp32 weights, moments and sums, between micro-batches,
2 data ranks): 18, 12, 10, 8 at ZeRO 0 to 3. The textbook's (Rajbhandari et al. 2020): 16, 10, 9, 8, since it
has sums in bf16 and keeps no gathered weights beside sharded ones.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from torch import nn

from ..layers import Cost, checkpointed
from ..pipeline.held_in_step import heaviest
from ..pipeline.schedule_actions import Kind
from ..pipeline.schedule_kinds import schedule_kind
from .activations import saved_under
from .first_backward import first_backward
from .rank_parameters import RankParameters, rank_parameters
from .shared_in_step import Place, gathered_bytes, gradient_bytes, shared_bytes, shared_key
from .stage_costs import StageCost, stage_costs
from .step_shape import Work


@dataclass(frozen=True)
class MemoryPlan:
    """Hold the bytes on the device by kind. ``logits`` and ``block`` are two instants; the worse one counts.

    ``gathered``: weights that are whole beside the stored shards. ``gradients``: those that last and exist at
    the worst instant; in the first backward of a step some do not yet. ``activations``: kept for backward, of
    all micro-batches in flight. ``logits``: in the loss of the last stage. ``block``: during one block's
    backward, what it computes again, its gradients, and what is gathered and summed over the data ranks.
    ``pipeline``: what stages exchange. ``host``: what offload puts into the host's memory.
    """

    weights: int = 0
    gathered: int = 0
    gradients: int = 0
    moments: int = 0
    activations: int = 0
    pipeline: int = 0
    logits: int = 0
    block: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Return the bytes on the device at the worst instant."""
        lasting = self.weights + self.gathered + self.gradients + self.moments
        return lasting + self.activations + self.pipeline + max(self.logits, self.block)


def plan_memory(work: Work, model: nn.Module, *, loss: Cost | None = None) -> MemoryPlan:
    """Return the memory of the rank of ``work``, whose stage ``model`` is; it may be on the meta device.

    Parameters that require no gradient have no moments, and nothing is kept for them. ``loss``: the cost of
    the loss, on the last stage of a module that is not the zoo's. Raises ``BadInput`` for a module that does
    not say what it costs.
    """
    return memory_of(work, rank_parameters(model, work.state), stage_costs(work, model, loss))


def memory_of(
    work: Work, held: RankParameters, stages: Sequence[StageCost], *, needs: Sequence[Need] | None = None
) -> MemoryPlan:
    """Return the memory of the rank of ``work``, from its parameters and the costs of its stages.

    ``needs``: what ``needs_of_rank`` returns, if it is known.
    """
    every = held.every
    resting = every.trained_stored * work.master + every.fixed_bytes
    moments = 2 * every.trained_stored * work.master
    sharded, whole = gradient_bytes(work, held)
    key = shared_key(work)
    shared, early = shared_bytes(held, key), None
    most, worst, elsewhere = -inf, None, {True: -inf, False: -inf}
    for one in needs or needs_of_rank(work, stages):
        in_loss = one.place == "loss"
        if one.absent:
            early = early or first_backward(work, held, key)
            total = one.bytes + (early.shared if one.first else shared)[one.place, one.stage]
            if total > elsewhere[in_loss]:  # otherwise it is less anyway
                total -= sum(early.missing(one.absent, one.first))
        else:
            total = one.bytes + shared[one.place, one.stage]
        if total > elsewhere[in_loss]:
            elsewhere[in_loss] = total
            if total > most:
                most, worst = total, one
    assert worst is not None
    kept, gathered = worst.held, gathered_bytes(work, held)
    gradients = whole + (0 if work.offload else sharded)
    if worst.absent:
        missing, dropped = first_backward(work, held, key).missing(worst.absent, worst.first)
        kept, gradients, gathered = min(kept, worst.bytes), gradients - int(missing), gathered - int(dropped)
        elsewhere = {loss: total + missing + dropped for loss, total in elsewhere.items()}
    return MemoryPlan(
        weights=0 if work.offload else resting,
        gathered=gathered,
        gradients=gradients,
        moments=0 if work.offload else moments,
        activations=int(kept - worst.messages),
        pipeline=int(worst.messages),
        logits=int(max(elsewhere[True] - kept, 0)),
        block=int(max(elsewhere[False] - kept, 0)),
        host=resting + moments + sharded if work.offload else 0,
    )


class Need(NamedTuple):
    """State the bytes of a rank at an instant of one of its stages.

    ``held``: the activations kept for backward, and the ``messages`` that its stages have sent or received.
    ``bytes``: these with what is needed beside; less, if kept activations are already given back. What data
    ranks share is not included (``shared_bytes``). ``absent``: for each of the rank's stages, how many of its
    blocks have no gradients yet; empty if all have. ``first``: whether no stage has had a backward before.
    """

    place: Place
    stage: int
    held: float
    messages: float
    bytes: float
    absent: tuple[int, ...] = ()
    first: bool = False


def needs_of_rank(
    work: Work, stages: Sequence[StageCost], known: dict[object, _Part] | None = None
) -> list[Need]:
    """Return what a rank needs at the instants that may be the worst. No ZeRO stage and no replicas count.

    ``known``: what was computed for the same stages before; new ones are added. They must live as long.
    """
    layout, number = work.layout, work.at.pipeline
    message = work.between_stages if layout.pipeline > 1 else 0
    here, known, parts = layout.stages_of(number), {} if known is None else known, list[_Part]()
    in_two = layout.pipeline > 1 and schedule_kind(work.schedule).two_backwards
    for stage, one in zip(here, stages, strict=True):
        given = stage - 1 in here
        key = id(one), work.checkpointing, work.checkpoint_every, layout.pipeline > 1, in_two, given
        if key not in known:
            known[key] = _Part(one, work, in_two=in_two, given=given)
        parts.append(known[key])
    places = {stage: place for place, stage in enumerate(here)}
    kept, halfway = [part.kept for part in parts], [part.halfway for part in parts]
    found: dict[tuple[Place, int, tuple[int, ...]], Need] = {}
    for kind, stage, held, count, early in heaviest(
        work.schedule, layout, work.micro_batches, number, kept, halfway, message
    ):
        at, messages = places[stage], count * message
        # Of a module that is not the zoo's it is not known when its gradients appear.
        early = early if parts[at].blocks else ()
        first = len(early) == len(parts)
        for name, beside, left in parts[at].needs(kind, at in early):
            absent: tuple[int, ...] = ()
            if early:
                absent = tuple(
                    left if place == at else part.blocks * (place in early)
                    for place, part in enumerate(parts)
                )
            before = found.get((name, at, absent))
            if before is None or before.bytes < held + beside:
                found[name, at, absent] = Need(name, at, held, messages, held + beside, absent, first)
    return [*found.values()]


class _Part:
    """Compute what one stage of a rank keeps of a micro-batch, and needs at each instant beside it.

    ``in_two``: whether a backward has two parts; ``given``: whether the stage before is on the same rank.
    ``kept``: the bytes from the forward to the backward. ``halfway``: those that the first part of a backward
    in two leaves to the second one, the gradients of what norms and products make.
    """

    def __init__(self, stage: StageCost, work: Work, *, in_two: bool, given: bool) -> None:
        self.stage, self.work = stage, work
        self.cut = work.layout.pipeline > 1
        self.logits = stage.loss.kept if stage.loss is not None and not work.loss_chunk else 0.0
        #: What each block that a backward reaches keeps and computes again.
        mode, every = work.checkpointing, work.checkpoint_every
        self.every = [
            (one, saved_under(mode if one.forgets else "none", one.cost, work))
            for one in stage.alike(mode, every)
            if one.reached
        ]
        self.blocks = len(stage.blocks)
        #: The same of blocks of multi-token prediction; in ``stage.beside`` nothing of them is dropped.
        self.further = [
            (cost, saved_under(mode if checkpointed(number, mode, every) else "none", cost, work))
            for number, cost in stage.further.items()
        ]
        dropped = sum(cost.kept - saved.kept for cost, saved in self.further)
        self.exit = stage.exit - dropped
        self.kept = stage.beside.kept - dropped + sum(one.count * saved.kept for one, saved in self.every)
        if self.cut:
            # Torch keeps a stage's output until the end of its backward: on a pipeline's last one the logits.
            self.kept += self.logits or work.between_stages
        if given:
            self.kept -= work.between_stages  # its input is the output of the stage before
        self.halfway = 0.0
        if in_two:
            self.halfway = stage.beside.outputs + sum(one.count * one.cost.outputs for one, _ in self.every)
            # The gradient of logits is written over them, if nothing else reads them.
            self.halfway -= self.logits * stage.overwrites

        self._needs: dict[tuple[Kind, bool], list[tuple[Place, float, int]]] = {}

    def needs(self, kind: Kind, first: bool) -> list[tuple[Place, float, int]]:
        """Return the instants of an action, each with the bytes that it needs beside the kept activations,
        and with how many blocks have no gradients: none, but in the ``first`` backward.
        """
        if (kind, first) not in self._needs:
            self._needs[kind, first] = [*self._instants(kind, first)]
        return self._needs[kind, first]

    def _instants(self, kind: Kind, first: bool) -> Iterator[tuple[Place, float, int]]:
        stage, loss = self.stage, self.stage.loss
        if kind == "F" and loss is not None:
            working = loss.working + (0.0 if self.cut and self.logits else loss.kept)
            yield "loss", working, self.blocks * first
        elif kind == "I":
            yield "inputs", self._in_first_part(), 0
        elif kind == "W" and not stage.first:
            yield "weights", 0.0, 0
            yield "weights made", -self.halfway, 0
        elif kind == "W":  # the model's first stage computes all of its backward now
            names: dict[Place, Place] = {
                "last block": "unsummed last block", "block": "unsummed block", "entry": "unsummed end"
            }  # fmt: skip
            yield "weights", 0.0, 0
            yield from ((names[at], size, 0) for at, size, _ in self._in_backward(first=False) if at in names)
        else:
            yield from self._in_backward(first)

    def _in_backward(self, first: bool) -> Iterator[tuple[Place, float, int]]:
        """Yield the instants of a whole backward: what it has given back counts as negative."""
        every = self.blocks * first
        if self.logits:
            logits = 0.0 if self.cut else self.logits
            yield "head", logits + self.work.tokens.bytes(self.work.hidden), every
        working = max([self.stage.beside.working, *(saved.recomputed for _, saved in self.further)])
        if working:
            yield "last block", working, every
        last = max((one.numbers[-1] for one, _ in self.every), default=-1)
        for one, saved in self.every:
            freed, behind = self._freed(one.numbers[-1])
            beside, left = saved.recomputed - freed, every - behind * first
            if one.numbers[-1] != last:
                yield "block", beside, left
            else:
                # In a pipeline the gradient of a stage's output is a message.
                given = self.work.between_stages if self.cut and self.stage.loss is None else 0.0
                yield "last block", beside - given, left
                yield "sum", -freed - saved.kept, left
                if first and not self.cut:
                    yield "gather", -freed - saved.kept, left
                if one.count > 1:
                    yield "block", beside - saved.kept, left - first
            if first:  # gradients may be more than activations: then the worst instant is late
                freed, behind = self._freed(one.numbers[0])
                yield "sum", -freed - saved.kept, every - behind
                if one.count > 1:
                    yield "block", saved.recomputed - freed, every - behind
        yield "entry", -self.kept, 0

    def _in_first_part(self) -> float:
        """Return the most bytes beside the kept activations in a backward's first part, which frees none.

        They are needed in a block, with what the blocks behind it leave, or in the norm at the end.
        """
        most, behind = 0.0, self.halfway - sum(one.count * one.cost.outputs for one, _ in self.every)
        for one, saved in self.every:
            first = one.numbers[0]
            after = (
                other.cost.outputs * (other.count - bisect(other.numbers, first)) for other, _ in self.every
            )
            most = max(most, behind + sum(after) + saved.recomputed)
        # An RMSNorm of several operators has the gradients of its mean and of its square, in three steps.
        norm = 0.0 if self.work.tokens.fused else 4 * self.work.between_blocks
        return max(most, self.halfway + norm)

    def _freed(self, number: int) -> tuple[float, int]:
        """Return the bytes that a micro-batch has given back when its backward comes to the block ``number``:
        what the output layer had kept, and the blocks behind it; and how many these are.
        """
        freed, behind = self.exit, 0
        for one, saved in self.every:
            count = one.count - bisect(one.numbers, number)
            freed += count * saved.kept
            behind += count
        return freed, behind
