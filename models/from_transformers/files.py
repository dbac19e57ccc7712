"""Read from transformers how the tensors of files become those of its modules, as links, without weights.

transformers' own conversion (``revert_weight_conversion``: renamed, split, stacked, transposed) runs on
tensors without memory that remember of which parts of our parameters they are made. An operation that does
not keep these in boxes refuses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...parallel_state import BadInput, Box
from ...parallel_state import Piece as StoredPiece
from ..base.hugging_face_names import Link


@dataclass(frozen=True)
class Piece:
    """Tie ``box`` of our parameter to ``at`` in a tensor; ``dims``: which of ours each dim there is."""

    ours: str
    box: Box
    at: Box
    dims: tuple[int, ...]


class Tracer(TorchFunctionMode):
    """Know the pieces of what torch's functions make in its block; ``None`` where they are lost."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, list[Piece] | None]] = {}

    def note(self, x: Tensor, pieces: list[Piece] | None) -> Tensor:
        """Note the pieces of a tensor, which then lives as long as this."""
        self._known[id(x)] = x, pieces
        return x

    def pieces(self, x: object) -> list[Piece] | None:
        """Return the pieces of a tensor."""
        return self._known[id(x)][1] if id(x) in self._known else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out, name = func(*args, **kwargs), getattr(func, "__name__", "")
        if isinstance(out, Tensor) and id(out) not in self._known:
            self.note(out, self._one(name, args, kwargs))
        elif isinstance(out, tuple | list) and out and isinstance(out[0], Tensor):
            for part, pieces in zip(out, self._several(name, out, args, kwargs), strict=True):
                self.note(part, pieces)
        return out

    def _one(self, name: str, args: Any, kwargs: dict[str, Any]) -> list[Piece] | None:
        x: Any = args[0] if args else None
        if name in ("cat", "concat"):
            return self._joined(x, _dim(x[0], args, kwargs, 1))
        pieces = self.pieces(x)
        if pieces is None or name in ("contiguous", "clone", "detach", "to", "cpu"):
            return pieces
        order = [*range(x.dim())]
        if name == "transpose":
            a, b = _dim(x, args, kwargs, 1, "dim0"), _dim(x, args, kwargs, 2, "dim1")
            order[a], order[b] = b, a
        elif name == "squeeze" and len(args) + len(kwargs) > 1:
            dim = _dim(x, args, kwargs, 1)
            order = [number for number in order if number != dim or x.shape[dim] != 1]
        else:
            return None
        return [_ordered(piece, order) for piece in pieces]

    def _joined(self, parts: Sequence[Tensor], dim: int) -> list[Piece] | None:
        start, made = 0, list[Piece]()
        for part in parts:
            pieces = self.pieces(part)
            if pieces is None:
                return None
            shift = tuple(start if number == dim else 0 for number in range(part.dim()))
            made += [replace(piece, at=piece.at.shift(shift)) for piece in pieces]
            start += part.shape[dim]
        return made

    def _several(
        self, name: str, outs: Sequence[Tensor], args: Any, kwargs: dict[str, Any]
    ) -> Iterator[list[Piece] | None]:
        pieces = self.pieces(args[0])
        if name not in ("chunk", "split", "split_with_sizes") or pieces is None:
            yield from [None] * len(outs)
            return
        x, dim, start = args[0], _dim(args[0], args, kwargs, 2), 0
        for out in outs:
            window = Box.whole(tuple(x.shape)).narrow(dim, start, start + out.shape[dim])
            yield [part for piece in pieces if (part := _within(piece, window)) is not None]
            start += out.shape[dim]


def _dim(x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str = "dim") -> int:
    dim = kwargs[name] if name in kwargs else (args[place] if len(args) > place else 0)
    return int(dim) % x.dim()


def _within(piece: Piece, window: Box) -> Piece | None:
    """Return the part of a piece inside a window, whose corner is then zero."""
    common = piece.at.intersect(window)
    if common is None:
        return None
    start, stop = [*piece.box.start], [*piece.box.stop]
    for number, dim in enumerate(piece.dims):
        start[dim] = piece.box.start[dim] + common.start[number] - piece.at.start[number]
        stop[dim] = start[dim] + common.stop[number] - common.start[number]
    return replace(piece, box=Box(tuple(start), tuple(stop)), at=common.within(window))


def _ordered(piece: Piece, order: Sequence[int]) -> Piece:
    at = Box(
        tuple(piece.at.start[number] for number in order), tuple(piece.at.stop[number] for number in order)
    )
    return replace(piece, at=at, dims=tuple(piece.dims[number] for number in order))


def file_links(model: Any, ours: Sequence[Link], kind: str) -> list[Link]:
    """Return the links of our parameters to the tensors of files, from those to transformers' modules."""
    from transformers.core_model_loading import revert_weight_conversion

    pieces: dict[str, list[Piece]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for link in ours:
        dims = tuple(range(len(link.ours_box.shape)))
        pieces.setdefault(link.hf, []).append(Piece(link.ours, link.ours_box, link.hf_box, dims))
        shapes[link.hf] = tuple(map(max, shapes.get(link.hf, (0,) * len(dims)), link.hf_box.stop))
    tracer = Tracer()
    with torch.device("meta"):
        traced = {name: tracer.note(torch.empty(shapes[name]), parts) for name, parts in pieces.items()}
    try:
        with tracer:
            written = revert_weight_conversion(model, traced)
    except Exception as error:  # whatever its rules raise
        first = str(error).strip().partition("\n")[0][:160]
        expected = "conversion rules that rename, split, stack and transpose"
        raise BadInput(kind, "files", expected=expected, found=f"{type(error).__name__}: {first}") from None
    links = [link for name, tensor in written.items() for link in _links(name, tracer.pieces(tensor), kind)]
    covered = {link.ours for link in links}
    for link in ours:
        if link.ours not in covered:
            expected, actual = "a tensor of files that holds it", "none, by transformers' rules"
            raise BadInput(kind, link.ours, expected=expected, found=actual)
    return links


def _links(name: str, pieces: list[Piece] | None, kind: str) -> list[Link]:
    lost = BadInput(
        kind, name, expected="a tensor of files made by renaming, splitting, stacking and transposing",
        found="one that transformers makes otherwise",
    )  # fmt: skip
    if pieces is None:
        raise lost
    links = []
    for piece in pieces:
        ours, dims = len(piece.box.shape), piece.dims
        plain = dims == tuple(range(ours - len(dims), ours)) and ours - len(dims) <= 1
        turned = dims == tuple(reversed(range(len(dims)))) and ours - len(dims) <= 1 and len(dims) > 1
        if not (plain or turned) or (ours > len(dims) and piece.box.shape[0 if plain else -1] != 1):
            raise lost
        along = tuple(dims.index(dim) if dim in dims else None for dim in range(ours))
        links.append(Link(piece.ours, StoredPiece(piece.box, name, piece.at.start, along, (1,) * ours)))
    return links
