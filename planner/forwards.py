"""Note what a rank holds in forwards: where FSDP gathers, and in blocks that no backward comes to."""

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
    root, places = walk.parameters.root.unsharded * walk.itemsize, range(len(walk.stages))
    for place, stage, instant in zip(places, walk.stages, first, strict=True):
        blocks = [piece.plain for piece in stage.stage.blocks.values()]
        if not blocks:
            continue
        walk.buffer = walk.earlier_buffer = walk.root_sum = walk.dropped = 0.0
        walk.missing, walk.resident = walk.gradients.persistent, instant.bytes
        later = (walk.gradients.of_stages[number].unsharded for number in places[place + 1 :])
        walk.now, walk.dropped = instant.bytes, sum(later) * walk.itemsize
        walk.note(_in_last_block(walk, stage) + walk.parameters.most("unsharded") * walk.itemsize)
        start, before = stage.kept - walk.work.between_blocks, root
        if len(blocks) > 1:
            last, before = blocks[-1], blocks[-2].weights
            kept = stage.runs[0].trace.kept if stage.runs else 0
            walk.note(last.weights + before - stage.exit - stage.output - kept + walk.work.between_blocks)
        if not place:
            walk.dropped = walk.gathered - root - blocks[0].weights
            walk.note(root + blocks[0].weights - start)


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


def _in_last_block(walk: RankWalk, stage: StageBytes) -> float:
    """Return the most bytes beside the kept ones in the forward of a stage's last block, in which the output
    of the stage is not there yet, and after it.
    """
    run = next((run for run in stage.runs if run.piece in stage.stage.blocks.values()), None)
    forward = 0 if run is None else max(run.piece.plain.forward, walk.work.between_blocks)
    return max(forward - stage.exit - stage.output, 0 if walk.pipelined else stage.logits)
