"""Note what a rank holds at the end of a step, where partial gradients are summed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rank_walk import RankWalk


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
