"""Note what a rank holds beside whole backwards: in forwards, in the second part of a backward in two, which
computes the gradients of weights, and at the end of a step, where partial gradients are summed.
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
    # FSDP keeps the buffer of an all-gather until it has copied what the next one received.
    own = block.weights - block.apart
    walk.note(_in_last_block(walk, stage) + zero3 * (block.weights + max(block.apart, own)))
    if zero3 and stage.runs and len(stage.stage.blocks) > 1:
        begun = walk.work.between_blocks - stage.exit - stage.output - block.kept
        walk.note(begun + 2 * own + walk.copied(block))
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


def walk_second_part(walk: RankWalk, place: int, exit: float, *, last: bool) -> None:
    """Note the instants of a second part. ``place``: of its stage on the rank; ``exit``: the trained elements
    of the root that it computes the gradients of; ``last``: whether it is the last one of its stage.

    Its pieces run from the first block on. The graph of the later ones keeps what no weight's gradient is
    computed from (``Trace.freed``).
    """
    gradients, stage = walk.gradients, walk.stages[place]
    computed, trained = gradients.of_stages[place].unsharded, gradients.of_stages[place].trained
    zero3, largest, first = walk.zero == 3, walk.parameters.most("trained"), place in walk.absent
    walk.now += computed * walk.itemsize * zero3
    before, missing = walk.now, walk.missing
    walk.note(max(walk.parameters.root.unsharded, walk.parameters.most("unsharded")) * walk.itemsize * zero3)
    start, gradients_so_far, adds = walk.now, 0.0, gradients.accumulates
    for piece, number, block in stage.in_two:
        part, grads = piece.second_part, piece.plain.gradients * (not adds)
        most = part.second_with_gradient if adds and not first else part.second_with_gradients
        for index in {0, number - 1}:
            walk.now = start - index * part.freed
            walk.note(gradients_so_far + index * grads + most)
        start -= number * part.freed
        gradients_so_far += number * grads
        if first and adds and block >= 0:
            walk.missing -= number * gradients.persistent_of(walk.parameters.group(block))
    walk.now = before - (stage.halfway + stage.kept)
    gradients_so_far = (trained + exit) * walk.itemsize
    summing = last and gradients.in_last
    if not (gradients.in_each or summing or adds):
        walk.note(gradients_so_far)
    if first:
        walk.missing = missing - gradients.persistent_of(gradients.of_stages[place])
        # The persistent gradients of the root come from FSDP's reduction.
        walk.missing -= 0 if gradients.in_each else walk.root_part
    if gradients.in_each:
        walk.buffer = 0.0
        apart = max((piece.plain.experts for piece, *_ in stage.in_two), default=0) / walk.itemsize
        elements = apart or largest
        last_elements = min(walk.parameters.most("largest" if apart else "last"), elements)
        reduction = gradients.reduction_peak(elements, last_elements, experts=apart > 0)
        walk.note(gradients_so_far - elements * walk.itemsize + reduction)
        if exit:
            walk.now -= computed * walk.itemsize * zero3
            walk.root_sum = 0.0
            walk.note(gradients.root_reduction_peak())
    elif summing:
        waits = 0 if adds else gradients_so_far - largest * walk.itemsize
        # FSDP reduces copies of gradients that it cuts along another dim, and the last gradient stays beside.
        last_gradient = walk.parameters.most("largest") * gradients.sum_itemsize * (walk.recut > 0)
        walk.note(waits + largest * walk.work.reduce + last_gradient)
    elif not adds:
        walk.note(walk.parameters.most("largest") * walk.itemsize)


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
