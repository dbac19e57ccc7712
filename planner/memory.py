"""Plan the memory of one rank in a step, by kind, at its worst moment: in the loss, or in a block's backward.

FSDP2's own bytes a parameter, measured (bf16 compute, fp32 weights, moments and sums, between micro-batches,
2 data ranks): 18, 12, 10, 8 at ZeRO 0 to 3. The textbook's (Rajbhandari et al. 2020): 16, 10, 9, 8, since it
has sums in bf16 and keeps no gathered weights beside sharded ones.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..layers import Cost
from ..pipeline.schedule_kinds import schedule_kind
from ..pipeline.timetable import held_at_once
from .activations import Saved, saved_under
from .rank_parameters import RankParameters, rank_parameters
from .stage_costs import Alike, StageCost, stage_costs
from .step_shape import Work


@dataclass(frozen=True)
class MemoryPlan:
    """Hold the bytes on the device by kind. ``logits`` and ``block`` are two moments; the worse one counts.

    ``gathered``: weights that are whole beside the stored shards. ``activations``: kept for backward, of all
    micro-batches in flight. ``logits``: in the loss of the last stage. ``block``: during one block's
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
        """Return the bytes on the device at the worst moment."""
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
    work: Work, held: RankParameters, stages: Sequence[StageCost], *, kept: tuple[int, int] | None = None
) -> MemoryPlan:
    """Return the memory of the rank of ``work``, from its parameters and the costs of its stages.

    ``kept``: what ``kept_activations`` returns, if it is known.
    """
    every = held.every
    resting = every.trained_stored * work.master + every.fixed_bytes
    moments = 2 * every.trained_stored * work.master
    sharded, whole = _gradients(work, held)
    activations, recomputed = kept or kept_activations(work, stages)
    losses = [one.loss for one in stages if one.loss is not None]
    return MemoryPlan(
        weights=0 if work.offload else resting,
        gathered=_gathered(work, held),
        gradients=whole + (0 if work.offload else sharded),
        moments=0 if work.offload else moments,
        activations=activations,
        pipeline=_pipeline_buffers(work, len(stages)),
        logits=int(sum(one.kept + one.working for one in losses)),
        block=recomputed + _communicated(work, held),
        host=resting + moments + sharded if work.offload else 0,
    )


def _alone(work: Work) -> bool:
    """Tell whether the weights are shared with no rank, and not by FSDP (``compute_weights``)."""
    return work.layout.holds_alone and not work.offload


def _gathered(work: Work, held: RankParameters) -> int:
    """Return the bytes of the weights that a rank computes with, where they are not the stored ones. With
    offload they are others even without ZeRO.
    """
    if not work.layout.zero and not work.offload:
        return held.every.here * work.compute if work.compute != work.master else 0
    return (held.every if work.layout.zero < 3 else held.root).here * work.compute


def _communicated(work: Work, held: RankParameters) -> int:
    """Return the bytes that FSDP sends for this block and the next: gathered weights, reduced gradients."""
    if _alone(work):
        # The gradients of a micro-batch before they are added to the others', and of what stages exchange:
        # one is made while the last one is sent.
        sent = 2 * work.between_stages if work.layout.pipeline > 1 else 0
        return max(held.root.trained, held.largest_trained_block) * work.reduce + sent
    if not work.layout.zero and work.reduce == work.master:
        # A group's gradients in the buffer that is summed and stays: the largest beside what it is made of.
        return max(held.root.trained, held.largest_trained_block) * work.reduce
    coming = 2 * held.largest_block * work.compute if work.layout.zero == 3 else 0
    whole = 0
    if work.layout.zero >= 2 and work.layout.pipeline > 1 and schedule_kind(work.schedule).two_backwards:
        # All gradients of a stage's weights are made before they are summed.
        whole = held.every.trained * work.compute // work.layout.virtual_stages
    return coming + whole + (held.root.trained + held.largest_trained_block) * work.reduce


def _gradients(work: Work, held: RankParameters) -> tuple[int, int]:
    """Return the bytes of gradients: (summed over the data ranks and sharded, whole and not summed yet)."""
    sharded = held.every.trained_stored * work.master
    if work.micro_batches == 1:
        return sharded, 0
    if _alone(work):
        return 0, held.every.trained * work.reduce
    if work.layout.zero >= 2:  # FSDP keeps the last group's input of the sum until the next backward
        return sharded, held.root.trained * work.reduce
    # Sums over the micro-batches; each is freed when its sharded sum is made.
    return (
        (sharded, held.every.trained * work.reduce) if work.offload else (0, held.every.trained * work.reduce)
    )


def kept_activations(work: Work, stages: Sequence[StageCost]) -> tuple[int, int]:
    """Return bytes: (kept by all micro-batches in flight, needed besides by one block in its backward). They
    depend on no ZeRO stage and no replicas.
    """
    held = held_at_once(work.schedule, work.layout, work.micro_batches, work.at.pipeline)
    cut = work.layout.pipeline > 1
    kept, recomputed = 0.0, 0.0
    for stage in stages:
        here, of_one = held[stage.number], stage.beside.kept
        recomputed = max(recomputed, stage.beside.working)
        every = [
            (one, saved_under(work.checkpointing if one.forgets else "none", one.cost, work))
            for one in stage.alike(work.checkpointing, work.checkpoint_every)
            if one.reached
        ]
        # Torch keeps a stage's output until the end of its backward: on a pipeline's last one the logits.
        logits = stage.loss is not None and not work.loss_chunk
        output = stage.loss.kept if cut and stage.loss is not None and logits else 0.0
        for one, saved in every:
            of_one += one.count * saved.kept
            recomputed = max(recomputed, output + saved.recomputed - _freed(one, every, stage, work))
        if cut and not logits:
            of_one += work.between_stages
        kept += here.micro_batches * of_one
        if stage.loss is not None and logits:  # GPipe has made the others' losses too
            kept += (here.micro_batches - 1) * stage.loss.kept
        if here.halfway:  # the gradient of what each norm and product of a block makes
            outputs = sum(block.outputs for block in [*stage.blocks.values(), stage.beside])
            kept += here.halfway * outputs
    return int(kept), int(recomputed)


def _freed(one: Alike, every: Sequence[tuple[Alike, Saved]], stage: StageCost, work: Work) -> float:
    """Return the bytes that a micro-batch has given back when its backward comes to the last block like
    ``one``: what the blocks and the output layer behind it had kept. On a pipeline's last stage, and with a
    loss in chunks, the output layer's were measured to stay; if the backward comes in two parts, all of them.
    """
    cut = work.layout.pipeline > 1
    if cut and schedule_kind(work.schedule).two_backwards:
        return 0.0
    behind = sum(
        saved.kept * (other.count - bisect(other.numbers, one.numbers[-1]))
        for other, saved in every
        if other is not one
    )
    return behind + (0.0 if cut or work.loss_chunk else stage.exit)


def _pipeline_buffers(work: Work, stages: int) -> int:
    """Return the bytes of what stages exchange, beside the inputs that blocks keep: a gradient that a stage
    receives, and what torch's schedules of several stages a rank keep of what they have sent in a step.
    """
    layout = work.layout
    if layout.pipeline == 1:
        return 0
    numbers = layout.stages_of(work.at.pipeline)
    receives = sum(number < layout.stages - 1 for number in numbers)
    borders = [
        other for number in numbers for other in (number - 1, number + 1) if 0 <= other < layout.stages
    ]
    sends = sum(layout.rank_of_stage(other) != work.at.pipeline for other in borders) if stages > 1 else 0
    return (receives + sends * work.micro_batches) * work.between_stages
