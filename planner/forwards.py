"""Note what a rank holds in forwards: where FSDP gathers, and in blocks that no backward comes to; and at the
end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..pipeline.held_in_step import Instant
from ..simulation.trace import Trace
from .stage_costs import StageBytes

if TYPE_CHECKING:
    from .rank_walk import RankWalk


def note_first_forwards(walk: RankWalk, first: Sequence[Instant]) -> None:
    """Note the first forward of each stage, in which ZeRO 1 and 2 gather the weights.

    FSDP keeps the buffer of an all-gather until it has copied what the next one received.
    """
    root, computed = walk.parameters.root.unsharded * walk.itemsize, walk.gradients.of_stages
    walk.buffer = walk.earlier_buffer = walk.root_sum = 0.0
    walk.missing, shards = walk.gradients.persistent, walk.work.layout.data_sizes(experts=True)[1]
    # Experts that are gathered apart come later than the rest of their block.
    apart = walk.parameters.most("apart") * shards * walk.itemsize
    for place, (stage, instant) in enumerate(zip(walk.stages, first, strict=True)):
        if not (blocks := [piece.plain.weights for piece in stage.stage.blocks.values()]):
            continue  # a user's module
        later = sum(group.unsharded for group in computed[place + 1 :]) * walk.itemsize
        walk.now, walk.resident, walk.dropped = instant.bytes, instant.bytes, later
        walk.note(_in_last_block(walk, stage) + walk.parameters.most("unsharded") * walk.itemsize)
        passed = walk.work.between_blocks
        if len(blocks) > 1 and not apart:
            last = stage.runs[0].trace if stage.runs else Trace()
            walk.note(blocks[-2] + blocks[-1] + passed - stage.exit - stage.output - last.kept)
        if not place:
            walk.dropped = walk.gathered - root - blocks[0]
            walk.note(blocks[0] + max(root - 2 * apart, 0) + passed - stage.kept)


def note_forwards(walk: RankWalk, stage: StageBytes) -> None:
    """Note the forwards of a micro-batch in the last block, and in blocks that no backward comes to."""
    zero3, block = walk.zero == 3, stage.runs[0].trace if stage.runs else Trace()
    # FSDP keeps the buffer of an all-gather until it has started the next one.
    received = max(block.experts, block.weights - block.experts)
    walk.note(_in_last_block(walk, stage) + zero3 * (block.weights + received))
    for piece in dict.fromkeys(stage.unreached):  # which keeps nothing
        # FSDP has prefetched the last of them for a backward that does not come, and holds the buffer in
        # which it received the block before.
        forward = max(piece.plain.kept + piece.plain.forward, zero3 * stage.largest)
        walk.note(walk.work.between_blocks - stage.kept + forward + zero3 * 3 * stage.largest)


def note_end(walk: RankWalk) -> None:
    """Note the bytes while partial gradients, which are copied together, are summed over tensor ranks or over
    the ends of a pipeline. With offload they are on the host.
    """
    total, work, gradients = walk.parameters.every, walk.work, walk.gradients
    partial = 0 if work.offload else max(total.partial, total.ends)
    if partial:
        walk.now = walk.resident = walk.buffer = walk.earlier_buffer = walk.root_sum = 0.0
        walk.dropped = 0.0 if gradients.without_fsdp else walk.gathered
        walk.missing = gradients.persistent - gradients.reduced(total)
        walk.note(partial * (work.master + work.reduce * (work.reduce > work.master)))


def _in_last_block(walk: RankWalk, stage: StageBytes) -> float:
    """Return the most bytes beside the kept ones in the forward of a stage's last block, in which the output
    of the stage is not there yet, and after it.
    """
    run = next((run for run in stage.runs if run.piece in stage.stage.blocks.values()), None)
    forward = 0 if run is None else max(run.piece.plain.forward, walk.work.between_blocks)
    return max(forward - stage.exit - stage.output, 0 if walk.pipelined else stage.logits)
