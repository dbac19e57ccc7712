"""Note what a rank holds in forwards: where FSDP gathers, and in blocks that no backward comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..simulation.trace import Trace
from .stage_costs import StageBytes

if TYPE_CHECKING:
    from .rank_walk import RankWalk


def note_first_forward(walk: RankWalk, stage: StageBytes) -> None:
    """Note the forward of a step's first micro-batch, in which ZeRO 1 and 2 gather the weights."""
    if walk.zero in (1, 2) and stage.runs:
        walk.dropped = walk.buffer = walk.earlier_buffer = walk.root_sum = 0.0
        walk.missing, walk.resident, walk.now = walk.gradients.persistent, stage.kept, stage.kept
        prefetched = walk.parameters.most("unsharded") * walk.itemsize
        walk.note(_in_last_block(walk, stage) + prefetched)


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
