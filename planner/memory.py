"""Plan the memory of one rank in a step, by kind, at its worst instant.

FSDP2's own bytes a parameter, measured (bf16 compute, fp32 weights, moments and sums, between micro-batches,
2 data ranks): 18, 12, 10, 8 at ZeRO 0 to 3. The textbook's (Rajbhandari et al. 2020): 16, 10, 9, 8, since it
has sums in bf16 and keeps no gathered weights beside sharded ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from torch import Tensor, nn

from ..pipeline.held_in_step import heaviest, last_backwards
from ..pipeline.schedule_kinds import schedule_kind
from .first_backward import first_backward
from .own_module import Loss, stages_of
from .rank_parameters import RankParameters, rank_parameters
from .shared_in_step import (
    IN_LAST,
    Place,
    adds_at_once,
    gathered_bytes,
    gradient_bytes,
    holds_alone,
    shared_bytes,
    shared_key,
)
from .stage_costs import StageCost
from .stage_instants import Instant, StageInstants
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
        return sum(self.parts(0).values())

    def parts(self, runtime: int) -> dict[str, int]:
        """Return the bytes at the worst instant by kind, in words, with those of the runtime."""
        in_loss = self.logits > self.block
        return {
            "weights": self.weights,
            "gathered weights": self.gathered,
            "gradients": self.gradients,
            "moments": self.moments,
            "activations": self.activations,
            "exchange of stages": self.pipeline,
            "logits" if in_loss else "one block's backward": max(self.logits, self.block),
            "runtime": runtime,
        }


def plan_memory(
    work: Work, model: nn.Module, *, samples: Mapping[str, Tensor] | None = None, loss: Loss | None = None
) -> MemoryPlan:
    """Return the memory of the rank of ``work``, whose stages ``model`` holds; it may be on the meta device.

    Parameters that require no gradient have no moments, and nothing is kept for them. ``samples``, ``loss``:
    what ``Step`` takes, for a module that is not the zoo's. Raises ``BadInput`` for one that cannot be
    traced.
    """
    return memory_of(work, rank_parameters(model, work.state), stages_of(work, model, samples, loss))


def memory_of(
    work: Work,
    parameters: RankParameters,
    stages: Sequence[StageCost],
    *,
    needs: Sequence[Need] | None = None,
) -> MemoryPlan:
    """Return the memory of the rank of ``work``, from its parameters and the costs of its stages.

    ``needs``: what ``needs_of_rank`` returns, if it is known.
    """
    all_groups = parameters.every
    resting = all_groups.trained_stored * work.master + all_groups.fixed_bytes
    moments = 2 * all_groups.trained_stored * work.master
    sharded, whole = gradient_bytes(work, parameters)
    key = shared_key(work)
    shared, early = shared_bytes(parameters, key), None
    most, worst, elsewhere = -inf, None, {True: -inf, False: -inf}
    zero, alone, several = work.layout.zero, holds_alone(work), work.micro_batches > 1
    added = adds_at_once(zero, alone, several, work.compute, work.reduce)
    # Of a module that is not the zoo's it is not known in which of its blocks an instant is.
    unknown = not any(stage.blocks for stage in stages)
    largest, ahead = parameters.largest_of_blocks * work.compute, 2 * parameters.largest_block * work.compute
    for need in needs or needs_of_rank(work, stages):
        in_loss, gathered = need.place == "loss", 0.0
        if zero == 3:
            gathered = ahead if unknown else need.gathered
        staying = max(need.staying, need.bytes + largest) if unknown else need.staying
        if need.absent:
            early = early or first_backward(work, parameters, key)
            total = gathered + (need.adding if added and not need.first else staying)
            total += (early.shared if need.first else shared)[need.place, need.stage]
            if total > elsewhere[in_loss]:  # otherwise it is less anyway
                total -= sum(early.missing(need.absent, need.first))
        else:
            # On a rank alone the gradients that last contain those of the block.
            total = gathered + (need.adding if added else need.bytes if alone else staying)
            total += shared[need.place, need.stage]
        if total > elsewhere[in_loss]:
            elsewhere[in_loss] = total
            if total > most:
                most, worst = total, need
    assert worst is not None
    resident, whole_weights = worst.resident, gathered_bytes(work, parameters)
    gradients = whole + (0 if work.offload else sharded)
    if worst.absent:
        missing, dropped = first_backward(work, parameters, key).missing(worst.absent, worst.first)
        resident, gradients = min(resident, worst.bytes), gradients - int(missing)
        whole_weights -= int(dropped)
        elsewhere = {loss: total + missing + dropped for loss, total in elsewhere.items()}
    return MemoryPlan(
        weights=0 if work.offload else resting,
        gathered=whole_weights,
        gradients=gradients,
        moments=0 if work.offload else moments,
        activations=int(resident - worst.messages),
        pipeline=int(worst.messages),
        logits=int(max(elsewhere[True] - resident, 0)),
        block=int(max(elsewhere[False] - resident, 0)),
        host=resting + moments + sharded if work.offload else 0,
    )


class Need(NamedTuple):
    """State the bytes of a rank at an instant of one of its stages.

    ``resident``: the activations kept for backward, and the ``messages`` that its stages have sent or
    received. ``bytes``: these with what is needed beside; less, if kept activations are already given back.
    What data ranks share is not included: ``gathered``, the blocks that ZeRO 3 gathers, and ``shared_bytes``.
    ``adding``: ``bytes`` with the gradient of a weight that is added to that of earlier micro-batches.
    ``staying``: ``bytes`` with the gradients of the block's weights that are made by then, if these stay.
    ``absent``: for each of the rank's stages, the bytes of its blocks' gradients that are not made yet; empty
    if all are. ``first``: whether no stage has had a backward before.
    """

    place: Place
    stage: int
    resident: float
    messages: float
    bytes: float
    adding: float
    staying: float
    gathered: float
    absent: tuple[float, ...] = ()
    first: bool = False

    @classmethod
    def at(
        cls,
        instant: Instant,
        stage: int,
        resident: float,
        messages: float,
        absent: tuple[float, ...],
        first: bool,
    ) -> Need:
        """Return the need at an instant of a stage, beside what the rank holds."""
        sizes = resident + instant.bytes, resident + instant.adding, resident + instant.staying
        return cls(instant.place, stage, resident, messages, *sizes, instant.gathered, absent, first)

    def covers(self, other: Need) -> bool:
        """Tell whether the other one needs no more, whatever of it counts."""
        return (
            self.bytes >= other.bytes
            and self.adding >= other.adding
            and self.staying >= other.staying
            and self.gathered >= other.gathered
        )


def needs_of_rank(
    work: Work, stages: Sequence[StageCost], known: dict[object, StageInstants] | None = None
) -> list[Need]:
    """Return what a rank needs at the instants that may be the worst. No ZeRO stage and no replicas count.

    ``known``: what was computed for the same stages before; new ones are added. They must live as long.
    """
    layout, number = work.layout, work.at.pipeline
    message = work.between_blocks if layout.pipeline > 1 else 0
    here, known, parts = layout.stages_of(number), {} if known is None else known, list[StageInstants]()
    in_two = layout.pipeline > 1 and schedule_kind(work.schedule).two_backwards
    largest = max((piece.weights for stage in stages for piece in stage.blocks.values()), default=0.0)
    for stage, cost in zip(here, stages, strict=True):
        own_input = stage - 1 in here
        key = (
            id(cost),
            work.checkpointing,
            work.checkpoint_every,
            layout.pipeline > 1,
            in_two,
            own_input,
            largest,
        )
        if key not in known:
            known[key] = StageInstants(cost, work, in_two=in_two, own_input=own_input, largest=largest)
        parts.append(known[key])
    places = {stage: place for place, stage in enumerate(here)}
    kept_bytes, halfway = [part.kept for part in parts], [part.halfway for part in parts]
    needs: dict[tuple[Place, int, tuple[float, ...]], list[Need]] = {}
    asked = work.schedule, layout, work.micro_batches, number, kept_bytes, halfway, message
    worst = [(instant, False) for instant in heaviest(*asked)]
    if layout.pipeline > 1 and work.micro_batches > 1:  # else the first backward is a stage's last one
        worst += [(instant, True) for instant in last_backwards(*asked)]
    for (kind, stage, resident, count, early), in_last in worst:
        at, messages = places[stage], count * message
        # Of a module that is not the zoo's it is not known when its gradients appear.
        early = early if stages[at].blocks else ()
        first = len(early) == len(parts)
        whole = (
            [part.gradients if place in early else 0.0 for place, part in enumerate(parts)] if early else []
        )
        for instant in parts[at].needs(kind, at in early):
            absent: tuple[float, ...] = ()
            if in_last:
                if instant.place not in IN_LAST:
                    continue
                instant = instant._replace(place=IN_LAST[instant.place])
            elif instant.place == "first forward":  # only a part of one micro-batch is there
                absent = tuple(part.gradients for part in parts)
                needs[instant.place, at, absent] = [Need.at(instant, at, kept_bytes[at], 0, absent, True)]
                continue
            if early:
                absent = (*whole[:at], instant.absent, *whole[at + 1 :])
            need = Need.at(instant, at, resident, messages, absent, first)
            # Of other kinds of blocks, or of other micro-batches; one that needs less of all is left out.
            others = needs.setdefault((instant.place, at, absent), [])
            for other in others:
                if other.covers(need):
                    break
            else:
                others[:] = [need, *(other for other in others if not need.covers(other))]
    return [need for alternatives in needs.values() for need in alternatives]
