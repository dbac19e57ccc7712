"""Tell how the pieces of an activation, or of its gradient, on the tensor ranks relate to the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    scale = max(_largest(whole), least)

    def off(a: Tensor, b: Tensor) -> float:
        return _apart(a, b) / scale

    found = [_as_whole(whole, parts, off), _as_cut(whole, parts, off), _as_partial(whole, parts, off)]
    for one in found:
        if one is not None and one.relative <= tolerance:
            return one
    shared = _as_shared(whole, parts, lambda a, b: off(a, b) <= tolerance)
    if shared is not None:
        return shared
    if found[0] is None and found[1] is None:
        shapes = " and ".join(sorted({str(tuple(part.shape)) for part in parts}))
        return Placement("differs", float("inf"), f"shape {shapes}, of {tuple(whole.shape)} on one process")
    likely = found[0] or found[1]
    assert likely is not None
    return Placement(
        "differs", likely.relative, _looks_like(whole, parts, lambda a, b: off(a, b) <= tolerance)
    )


def _as_whole(whole: Tensor, parts: Sequence[Tensor], off: _Off) -> Placement | None:
    if any(part.shape != whole.shape for part in parts):
        return None
    return Placement("whole", max(off(whole, part) for part in parts))


def _as_partial(whole: Tensor, parts: Sequence[Tensor], off: _Off) -> Placement | None:
    if len(parts) < 2 or any(part.shape != whole.shape for part in parts) or not whole.is_floating_point():
        return None
    return Placement("partial", off(whole, torch.stack([*parts]).sum(0)))


def _as_cut(whole: Tensor, parts: Sequence[Tensor], off: _Off) -> Placement | None:
    dim = _cut_dim(whole, parts)
    if dim is None or parts[0].shape[dim] * len(parts) < whole.shape[dim]:
        return None
    worst = max(off(*_pair(whole, part, dim, rank)) for rank, part in enumerate(parts))
    return Placement("cut", worst)


def _as_shared(whole: Tensor, parts: Sequence[Tensor], same: _Same) -> Placement | None:
    dim = _cut_dim(whole, parts)
    if dim is None or parts[0].shape[dim] * len(parts) <= whole.shape[dim]:
        return None
    reached = 0
    for part in parts:
        length = part.shape[dim]
        starts = range(whole.shape[dim] - length + 1)
        start = next((s for s in starts if same(whole.narrow(dim, s, length), part)), None)
        if start is None or start > reached:
            return None
        reached = max(reached, start + length)
    return Placement("shared", 0.0) if reached == whole.shape[dim] else None


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
    if any(part.shape != whole.shape for part in parts) or not whole.is_floating_point():
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


def _apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference; equal infinities do not differ, and NaN always does."""
    if a.shape != b.shape:
        return float("inf")
    gaps = torch.where(a == b, 0.0, (a.double() - b.double()).abs())
    return float(gaps.nan_to_num(nan=float("inf")).max()) if gaps.numel() else 0.0


def _largest(x: Tensor) -> float:
    finite = x.double().abs()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0
