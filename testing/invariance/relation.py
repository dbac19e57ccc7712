"""Tell how the pieces of an activation, or of its gradient, on the tensor ranks relate to the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layouts import apart, largest

_Off = Callable[[Tensor, Tensor], float]
_Same = Callable[[Tensor, Tensor], bool]


@dataclass(frozen=True)
class Placement:
    """Describe how ranks hold a tensor, and how far it is from the whole.

    ``kind``: ``whole`` on every rank, ``cut`` into pieces in the ranks' order, ``shared`` (pieces in order
    that overlap), ``partial`` (the ranks' sum is the whole), or ``differs``. ``relative``: the largest
    difference over the whole's largest element. ``note``: the mistake that a difference looks like.
    """

    kind: str
    relative: float
    note: str = ""

    @property
    def settled(self) -> bool:
        """Return whether the tensor is right and no sum over the ranks is missing."""
        return self.kind in ("whole", "cut", "shared")


def place(whole: Tensor, parts: Sequence[Tensor], *, tolerance: float, least: float = 1e-300) -> Placement:
    """Find out how ``parts``, one for each tensor rank in order, relate to ``whole``.

    ``tolerance`` is relative to the whole's largest element, or to ``least`` if that is larger. Padding
    beyond the whole's end is ignored.
    """
    scale = max(largest(whole), least)

    def off(a: Tensor, b: Tensor) -> float:
        return apart(a, b) / scale

    def same(a: Tensor, b: Tensor) -> bool:
        return off(a, b) <= tolerance

    known: list[float] = []
    for kind, relation in (("whole", _as_whole), ("cut", _as_cut), ("partial", _as_partial)):
        relative = relation(whole, parts, off)
        if relative is not None and relative <= tolerance:
            return Placement(kind, relative)
        known += [relative] if relative is not None else []
    if _are_shared(whole, parts, same):
        return Placement("shared", 0.0)
    if known:
        return Placement("differs", known[0], _looks_like(whole, parts, same))
    shapes = " and ".join(sorted({str(tuple(part.shape)) for part in parts}))
    return Placement("differs", float("inf"), f"shape {shapes}, of {tuple(whole.shape)} on one process")


def _as_whole(whole: Tensor, parts: Sequence[Tensor], off: _Off) -> float | None:
    return max(off(whole, part) for part in parts) if _are_alike(whole, parts) else None


def _as_cut(whole: Tensor, parts: Sequence[Tensor], off: _Off) -> float | None:
    dim = _cut_dim(whole, parts)
    if dim is None or parts[0].shape[dim] * len(parts) < whole.shape[dim]:
        return None
    return max(off(*_pair(whole, part, dim, rank)) for rank, part in enumerate(parts))


def _as_partial(whole: Tensor, parts: Sequence[Tensor], off: _Off) -> float | None:
    if len(parts) < 2 or not _are_alike(whole, parts) or not whole.is_floating_point():
        return None
    return off(whole, torch.stack([*parts]).sum(0))


def _are_shared(whole: Tensor, parts: Sequence[Tensor], same: _Same) -> bool:
    """Return whether each part is a piece of the whole that begins within, or next to, those before it."""
    dim = _cut_dim(whole, parts)
    if dim is None or parts[0].shape[dim] * len(parts) <= whole.shape[dim]:
        return False
    reached, length = 0, parts[0].shape[dim]
    for part in parts:
        starts = range(whole.shape[dim] - length + 1)
        start = next((one for one in starts if same(whole.narrow(dim, one, length), part)), None)
        if start is None or start > reached:
            return False
        reached = max(reached, start + length)
    return reached == whole.shape[dim]


def _looks_like(whole: Tensor, parts: Sequence[Tensor], same: _Same) -> str:
    """Return which known mistake the difference looks like, or an empty string."""
    count, dim = len(parts), _cut_dim(whole, parts)
    if dim is not None:
        pieces = [_pair(whole, parts[0], dim, rank)[0] for rank in range(count)]
        order = [next((i for i, piece in enumerate(pieces) if same(piece, part)), None) for part in parts]
        if None not in order:
            where = ", ".join(f"rank {rank} holds piece {piece}" for rank, piece in enumerate(order))
            return f"the pieces of dim {dim} lie in another order: {where}"
        return ""
    if not _are_alike(whole, parts) or not whole.is_floating_point():
        return ""
    if count > 1 and all(same(count * whole, part) for part in parts):
        return f"{count} times too large: it was summed over {count} ranks that each had all of it"
    if count > 1 and all(same(whole, count * part) for part in parts):
        return f"{count} times too small"
    if whole.ndim < 2:
        return ""
    if _one_vector_more(whole, parts[0], same):
        return "one vector too much at every place, as of a bias that every rank adds before the sum"
    if count > 1 and _one_vector_more(whole, torch.stack([*parts]).sum(0), same):
        return (
            "it is only a part on each rank, and nothing adds them up; each rank adds one vector too, as of "
            "a bias: a collective is missing before that"
        )
    return ""


def _one_vector_more(whole: Tensor, found: Tensor, same: _Same) -> bool:
    extra = (found - whole).reshape(-1, whole.shape[-1])
    return len(extra) > 1 and same(extra[:1].expand_as(extra), extra) and not same(found, whole)


def _are_alike(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    return all(part.shape == whole.shape for part in parts)


def _cut_dim(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """Return the one dim in which all parts differ from the whole in the same way."""
    if any(part.shape != parts[0].shape or part.ndim != whole.ndim for part in parts):
        return None
    dims = [d for d in range(whole.ndim) if parts[0].shape[d] != whole.shape[d]]
    return dims[0] if len(dims) == 1 else None


def _pair(whole: Tensor, part: Tensor, dim: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the whole's piece of this rank, and the part without padding behind the whole's end."""
    length, end = part.shape[dim], whole.shape[dim]
    start, stop = min(rank * length, end), min((rank + 1) * length, end)
    return whole.narrow(dim, start, stop - start), part.narrow(dim, 0, stop - start)
