"""Walk through the second part of a backward in two, which computes the gradients of weights.

Its pieces run from the first block on. The graph of the later ones keeps what no weight's gradient is
computed from (``Trace.freed``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rank_walk import RankWalk


def walk_second_part(walk: RankWalk, place: int, exit: float, *, last: bool) -> None:
    """Note the instants of a second part. ``place``: of its stage on the rank; ``exit``: the trained elements
    of the root that it computes the gradients of; ``last``: whether it is the last one of its stage.
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
