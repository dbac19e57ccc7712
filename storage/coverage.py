"""Check that boxes tile a tensor with each element owned exactly once, or return the first box that fails."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..parallel_state import BadCheckpoint, BadInput, Box


@dataclass(frozen=True, slots=True)
class Flaw:
    """Say that ``box`` of the tensor is owned ``times`` times instead of once."""

    box: Box
    times: int

    def __str__(self) -> str:
        place = ", ".join(f"{a}:{b}" for a, b in zip(self.box.start, self.box.stop, strict=True))
        return f"[{place}] owned {'by nobody' if self.times == 0 else f'{self.times} times'}"


def first_flaw(whole: Box, boxes: Sequence[Box]) -> Flaw | None:
    """Return the first part of ``whole`` that is not in exactly one of ``boxes``; parts outside do not count.

    The cost is about ``n log n`` for the grids that layouts make: it sweeps slabs between cuts, one dim after
    the other.
    """
    inside = [part for box in boxes if (part := box.intersect(whole)) is not None]
    return _sweep(whole, inside, 0) if whole.size else None


def check_coverage(
    where: object,
    name: str,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    *,
    kind: type[BadInput] = BadCheckpoint,
) -> None:
    """Refuse, naming tensor and box, unless ``boxes`` lie inside ``shape`` and own each element once."""
    for box in boxes:
        if len(box.stop) != len(shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
            raise kind(
                where, name, expected=f"boxes inside {list(shape)}", found=f"one up to {list(box.stop)}"
            )
    if flaw := first_flaw(Box.whole(shape), boxes):
        raise kind(where, name, expected="each element owned exactly once", found=str(flaw))


def _sweep(whole: Box, boxes: Sequence[Box], dim: int) -> Flaw | None:
    """Return the first flaw in ``dim`` or a later dim; in earlier dims all ``boxes`` span ``whole``."""
    if len(boxes) == 1 and boxes[0] == whole:
        return None
    if not boxes or dim == len(whole.start):
        return None if len(boxes) == 1 else Flaw(whole, len(boxes))
    cuts = {whole.start[dim], whole.stop[dim]}
    for box in boxes:
        cuts.add(box.start[dim])
        cuts.add(box.stop[dim])
    waiting = sorted(boxes, key=lambda box: box.start[dim], reverse=True)
    active: list[Box] = []
    for begin, end in pairwise(sorted(cuts)):
        active = [box for box in active if box.stop[dim] >= end]
        while waiting and waiting[-1].start[dim] == begin:
            active.append(waiting.pop())
        if len(active) == 1 and _spans(active[0], whole, dim + 1):
            continue  # nearly every slab is of this kind
        slab = _with(whole, dim, begin, end)
        if flaw := _sweep(slab, [_with(box, dim, begin, end) for box in active], dim + 1):
            return flaw
    return None


def _spans(box: Box, whole: Box, dim: int) -> bool:
    return box.start[dim:] == whole.start[dim:] and box.stop[dim:] == whole.stop[dim:]


def _with(box: Box, dim: int, begin: int, end: int) -> Box:
    return box.narrow(dim, begin - box.start[dim], end - box.start[dim])
