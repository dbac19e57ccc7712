"""Tell how the pieces of an activation, or of its gradient, on the tensor ranks relate to the whole."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel_state import shared_units
from ...system import counted
from ..layouts import apart, largest

_Same = Callable[[Tensor, Tensor], bool]


@dataclass(frozen=True)
class Placement:
    """Describe how ranks hold a tensor, and how far it is from the whole.

    ``kind``: ``whole`` on every rank, ``cut`` into pieces in the ranks' order, ``shared`` (pieces in order
    that overlap), ``partial`` (the ranks' sum is the whole; they may hold such pieces), or ``differs``.
    ``relative``: the largest difference over the whole's largest element. ``note``: the mistake that a
    difference looks like.
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

    def same(a: Tensor, b: Tensor) -> bool:
        return apart(a, b) / scale <= tolerance

    if all(part.shape == whole.shape for part in parts):
        relative = max(apart(whole, part) for part in parts) / scale
        if relative <= tolerance:
            return Placement("whole", relative)
        numbers = whole.is_floating_point()
        summed = torch.stack([*parts]).sum(0) if numbers and len(parts) > 1 else None
        if summed is not None and same(whole, summed):
            return Placement("partial", apart(whole, summed) / scale)
        return Placement("differs", relative, _mistake(whole, parts, summed, same) if numbers else "")
    dim = _cut_dim(whole, parts)
    if dim is None or parts[0].shape[dim] * len(parts) < whole.shape[dim]:
        shapes = " and ".join(sorted({str(tuple(part.shape)) for part in parts}))
        return Placement("differs", float("inf"), f"shape {shapes}, of {tuple(whole.shape)} on one process")
    relative = max(apart(*_pair(whole, part, dim, rank)) for rank, part in enumerate(parts)) / scale
    if relative <= tolerance:
        return Placement("cut", relative)
    if _are_shared(whole, parts, dim, same):
        return Placement("shared", 0.0)
    if whole.is_floating_point() and any(same(whole, total) for total in _sums_of_shared(whole, parts, dim)):
        return Placement("partial", 0.0)
    return Placement("differs", relative, _other_order(whole, parts, dim, same))


def _are_shared(whole: Tensor, parts: Sequence[Tensor], dim: int, same: _Same) -> bool:
    """Return whether each part is a piece of the whole that begins within, or next to, those before it."""
    reached, length = 0, parts[0].shape[dim]
    for part in parts:
        starts = range(whole.shape[dim] - length + 1)
        start = next((at for at in starts if same(whole.narrow(dim, at, length), part)), None)
        if start is None or start > reached:
            return False
        reached = max(reached, start + length)
    return reached == whole.shape[dim]


def _sums_of_shared(whole: Tensor, parts: Sequence[Tensor], dim: int) -> Iterator[Tensor]:
    """Yield the sums of the parts as pieces that overlap, for each number of units that ranks may share."""
    size, length = len(parts), parts[0].shape[dim]
    for units in (units for units in range(1, whole.shape[dim]) if whole.shape[dim] % units == 0):
        width = whole.shape[dim] // units
        shares = [shared_units(units, size, rank) for rank in range(size)]
        if all(len(share) * width == length for share in shares):
            total = torch.zeros_like(whole)
            for share, part in zip(shares, parts, strict=True):
                total.narrow(dim, share.start * width, length).add_(part)
            yield total


def _other_order(whole: Tensor, parts: Sequence[Tensor], dim: int, same: _Same) -> str:
    """Return which rank holds which piece of the whole, or an empty string if some hold none."""
    pieces = [_pair(whole, part, dim, rank)[0] for rank, part in enumerate(parts)]
    order = [next((i for i, piece in enumerate(pieces) if same(piece, part)), None) for part in parts]
    where = ", ".join(f"rank {rank} holds piece {piece}" for rank, piece in enumerate(order))
    return "" if None in order else f"the pieces of dim {dim} lie in another order: {where}"


def _mistake(whole: Tensor, parts: Sequence[Tensor], summed: Tensor | None, same: _Same) -> str:
    """Return which known mistake the difference looks like, or an empty string."""
    count = len(parts)
    if summed is not None and all(same(count * whole, part) for part in parts):
        return f"{count} times too large: it was summed over {counted(count, 'rank')} that each had all of it"
    if whole.ndim > 1 and _one_vector_more(whole, parts[0], same):
        return "one vector too much at every place, as of a bias that every rank adds before the sum"
    if whole.ndim > 1 and summed is not None and _one_vector_more(whole, summed, same):
        return (
            "it is only a part on each rank, and nothing adds them up; each rank adds one vector too, as of "
            "a bias: a collective is missing before that"
        )
    return ""


def _one_vector_more(whole: Tensor, other: Tensor, same: _Same) -> bool:
    extra = (other - whole).reshape(-1, whole.shape[-1])
    return len(extra) > 1 and same(extra[:1].expand_as(extra), extra) and not same(other, whole)


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
