"""The memory of one rank in a step, by kind, at its worst moment: in the loss, or in a block's backward.

FSDP2's own bytes a parameter, measured (bf16 compute, fp32 weights, moments and sums, between micro-batches,
2 data ranks): 18, 12, 10, 8 at ZeRO 0 to 3. The textbook's (Rajbhandari et al. 2020): 16, 10, 9, 8, since it
has sums in bf16 and keeps no gathered weights beside sharded ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..layers import Stage, checkpointed, padded_vocabulary
from ..parallel_state import BUFFER_DTYPE, BadInput, Coordinates, Declaration
from ..pipeline.schedules import schedule_kind
from ..pipeline.timetable import held_at_once
from .activations import block_shape, kept_in_block, norm_bytes
from .rank_parameters import RankParameters, rank_parameters
from .step_shape import Work


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device by kind. ``logits`` and ``block`` are two moments, of which the worse one counts.

    ``gathered``: weights that are whole beside the stored shards. ``activations``: kept for backward, of all
    micro-batches in flight. ``logits``: in the last stage's loss. ``block``: while one block is in its
    backward, what it computes again, its gradients, and what is gathered and summed over the data ranks.
    ``pipeline``: torch's buffers for receiving. ``host``: what offload puts into the host's memory.
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
        """On the device at the worst moment."""
        lasting = self.weights + self.gathered + self.gradients + self.moments
        return lasting + self.activations + self.pipeline + max(self.logits, self.block)


def plan_memory(
    work: Work,
    stated: Mapping[str, Declaration],
    stage: Stage,
    at: Coordinates,
    *,
    frozen: Collection[str] = (),
) -> MemoryPlan:
    """The memory of the rank at these coordinates, which holds ``stage`` with these declarations.

    ``frozen`` names parameters without gradient and moments, for which nothing is kept either. Raises
    ``BadInput`` for a model whose memory cannot be told.
    """
    if (cap := getattr(work.config, "attn_logit_softcapping", None)) is not None:
        expected = "null: the memory of attention whose scores are bounded is not planned yet"
        raise BadInput("dry run", "attn_logit_softcapping", expected=expected, found=cap)
    held = rank_parameters(stated, work.layout, at, frozen=frozen)
    resting = held.trained_stored * work.master + (held.stored - held.trained_stored) * work.frozen
    resting += BUFFER_DTYPE.itemsize * held.buffers
    moments = 2 * held.trained_stored * work.master
    sharded, whole = _gradients(work, held)
    kept, again = _activations(work, stated, stage, at, frozen)
    head = "embed.weight" if work.config.tie_word_embeddings else "head.weight"
    return MemoryPlan(
        weights=0 if work.offload else resting,
        gathered=_gathered(work, held),
        gradients=whole + (0 if work.offload else sharded),
        moments=0 if work.offload else moments,
        activations=kept,
        pipeline=_pipeline_buffers(work, stage),
        logits=_logits(work, stage, trained=head not in frozen),
        block=again + _communicated(work, held),
        host=resting + moments + sharded if work.offload else 0,
    )


def _gathered(work: Work, held: RankParameters) -> int:
    """Weights as they are computed with; FSDP has them beside the stored ones also on one data rank."""
    return (held.stage if work.layout.zero < 3 else held.root) * work.compute


def _communicated(work: Work, held: RankParameters) -> int:
    """Of the block at hand and the next: weights on their way in, gradients on their way out."""
    coming = 2 * held.largest_block * work.compute if work.layout.zero == 3 else 0
    whole = 0
    if work.layout.zero >= 2 and work.layout.pipeline > 1 and schedule_kind(work.schedule).two_backwards:
        # The gradients of a stage's weights are made together, and only then summed.
        whole = held.trained * work.compute // work.layout.virtual_stages
    return coming + whole + (held.trained_root + held.largest_trained_block) * work.reduce


def _gradients(work: Work, held: RankParameters) -> tuple[int, int]:
    """(summed over the data ranks and sharded, whole and not summed yet)."""
    sharded = held.trained_stored * work.master
    if work.micro_batches == 1:
        return sharded, 0
    if work.layout.zero >= 2:  # FSDP keeps the last group's input of the sum until the next backward
        return sharded, held.trained_root * work.reduce
    # Sums over the micro-batches; they go as the sharded ones come.
    return (sharded, held.trained * work.reduce) if work.offload else (0, held.trained * work.reduce)


def _activations(
    work: Work, stated: Mapping[str, Declaration], stage: Stage, at: Coordinates, frozen: Collection[str]
) -> tuple[int, int]:
    """(kept by all micro-batches in flight, needed besides by one block in its backward)."""
    held = held_at_once(work.schedule, work.layout, work.micro_batches, at.pipeline)
    kept, again = 0.0, 0.0
    for part in stage.parts:
        here = held[part.number]
        of_one, block = _one_in_flight(work, stated, part, at, frozen, here.micro_batches)
        kept, again = kept + here.micro_batches * of_one, max(again, block)
        if here.halfway:
            kept += here.halfway * _halfway(work, stated, part, at, frozen)
    return int(kept), int(again)


def _halfway(
    work: Work, stated: Mapping[str, Declaration], stage: Stage, at: Coordinates, frozen: Collection[str]
) -> float:
    """Between the two parts of a backward: the gradient of what each norm and product of a block gives."""
    widths = 0.0
    for number in stage.blocks:
        one = block_shape(work, stated, number, at, frozen=frozen)
        products = one.query + 2 * one.key_value + (2 if one.gated else 1) * one.feed_forward
        widths += products + 2 * one.hidden + 2 * one.residual
    if stage.last:
        widths += _columns(work)
    return widths * work.compute * work.tokens


def _one_in_flight(
    work: Work,
    stated: Mapping[str, Declaration],
    stage: Stage,
    at: Coordinates,
    frozen: Collection[str],
    held: int,
) -> tuple[float, float]:
    """Of one micro-batch, of ``held`` that this one stage of the rank holds at once."""
    tokens, layout = work.tokens, work.layout
    kept, again = 0.0, 0.0
    residual = work.config.hidden_size / (layout.tensor if layout.sequence else 1)
    rms = True
    # Backward ends at the first trained parameter; later stages of torch's send theirs back in any case.
    trained = {".".join(name.split(".")[:2]) for name in stated if name not in frozen}
    reached = not stage.first or bool(trained & {"embed.weight", "position.weight"})
    for number in stage.blocks:
        reached = reached or f"layers.{number}" in trained
        if not reached:
            continue
        shape = block_shape(work, stated, number, at, frozen=frozen)
        rms = shape.rms
        forgets = checkpointed(number, work.checkpointing, work.checkpoint_every)
        one = kept_in_block(work, shape, work.checkpointing if forgets else "none")
        kept, again = kept + one.kept * tokens, max(again, one.again)
    if stage.first and getattr(work.config, "embd_pdrop", 0.0) > 0:
        kept += residual * work.mask * tokens
    if stage.last:
        kept += (norm_bytes(work, residual, work.config.hidden_size, rms=rms)) * tokens
        kept += work.config.hidden_size * work.compute * tokens
    if layout.pipeline > 1:
        kept += residual * work.compute * tokens  # a stage keeps its output until its backward
    rope = 2 * work.length * getattr(work.config, "rotary_dim", 0) * work.compute
    columns = _columns(work) if stage.last else 0
    if not work.loss_chunk:  # GPipe has made the losses of the other micro-batches too
        kept += columns * (work.inner + work.compute) * tokens * (held - 1) / max(held, 1)
    return kept + rope, again * tokens


def _logits(work: Work, stage: Stage, *, trained: bool) -> int:
    """Of the loss, on the last stage: the softmax is kept, its gradient is made beside it."""
    if not stage.last:
        return 0
    columns = _columns(work)
    cast = work.compute if work.compute < work.inner else 0
    capped = getattr(work.config, "final_logit_softcapping", None) is not None
    if work.loss_chunk:
        chunk = min(work.loss_chunk, work.tokens)
        weight = columns * work.config.hidden_size * (work.inner + cast) * int(trained)
        hidden = work.tokens * work.config.hidden_size * work.compute
        bounded = 2 * work.inner if capped else 0  # the bounded logits, and the derivative of the bound
        return chunk * columns * (work.inner + cast + bounded) + weight + hidden
    output = work.compute if work.layout.pipeline > 1 else 0  # which torch's stage keeps
    bounded = work.compute if capped else 0  # of the logits the bound keeps its tanh
    return work.tokens * columns * (2 * work.inner + output + cast + bounded)


def _columns(work: Work) -> int:
    """The columns of a rank's logits, padding included."""
    return padded_vocabulary(work.config.vocab_size, work.layout.tensor) // work.layout.tensor


def _pipeline_buffers(work: Work, stage: Stage) -> int:
    """Torch's stage has a buffer a micro-batch for what it receives, both ways, from the first step on.

    Its schedules of several stages a rank also keep what they have sent, until the step ends.
    """
    if work.layout.pipeline == 1:
        return 0
    piece = work.tokens * work.config.hidden_size * work.compute
    piece //= work.layout.tensor if work.layout.sequence else 1
    sent = 2 if len(stage.parts) > 1 else 1
    return sent * work.micro_batches * piece * sum((not part.first) + (not part.last) for part in stage.parts)
