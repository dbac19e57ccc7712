"""Read from transformers how the tensors of files become those of its modules, as links, without weights.

transformers' own conversion (``revert_weight_conversion``: renamed, split, stacked, transposed) runs on tensors
without memory that remember of which parts of our parameters they are made. An operation that does not keep
them in boxes refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...parallel_state import BadInput, Box
from ..base.hugging_face_names import Link


@dataclass(frozen=True)
class Piece:
    """Tie ``box`` of one of our parameters to ``at`` in a tensor; ``dims``: which of ours each dim there is."""

    ours: str
    box: Box
    at: Box
    dims: tuple[int, ...]


class Traced(Tensor):
    """Be a tensor without memory that knows its pieces; ``None`` once an operation has lost them."""

    pieces: list[Piece] | None

    @staticmethod
    def of(shape: Sequence[int], pieces: list[Piece] | None) -> Traced:
        """Return one of this shape."""
        made: Traced = torch.Tensor._make_subclass(Traced, torch.empty(tuple(shape), device="meta"))  # type: ignore[attr-defined]
        made.pieces = pieces
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            name = getattr(func, "__name__", "")
            if isinstance(out, Tensor):
                return _one(name, out, args, kwargs)
            if isinstance(out, tuple | list) and out and isinstance(out[0], Tensor):
                return type(out)(_several(name, [*out], args, kwargs))
            return out


def _dim(x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str = "dim") -> int:
    dim = kwargs[name] if name in kwargs else (args[place] if len(args) > place else 0)
    return int(dim) % x.dim()


def _one(name: str, out: Tensor, args: Any, kwargs: dict[str, Any]) -> Traced:
    x = args[0]
    pieces: list[Piece] | None = None
    if name in ("contiguous", "clone", "detach", "to", "cpu"):
        pieces = x.pieces
    elif name == "transpose" and x.pieces is not None:
        a, b = _dim(x, args, kwargs, 1, "dim0"), _dim(x, args, kwargs, 2, "dim1")
        order = [*range(x.dim())]
        order[a], order[b] = b, a
        pieces = [_ordered(piece, order) for piece in x.pieces]
    elif name == "squeeze" and x.pieces is not None:
        dim = _dim(x, args, kwargs, 1)
        order = [number for number in range(x.dim()) if number != dim]
        pieces = [_ordered(piece, order) for piece in x.pieces] if x.shape[dim] == 1 else x.pieces
    elif name == "unsqueeze" and x.pieces is not None:
        pieces = None
    elif name in ("cat", "concat") and all(part.pieces is not None for part in x):
        dim, start, pieces = _dim(x[0], args, kwargs, 1), 0, []
        for part in x:
            shift = tuple(start if number == dim else 0 for number in range(part.dim()))
            pieces += [replace(piece, at=piece.at.shift(shift)) for piece in part.pieces]
            start += part.shape[dim]
    return Traced.of(out.shape, pieces)


def _several(name: str, outs: list[Tensor], args: Any, kwargs: dict[str, Any]) -> list[Traced]:
    x = args[0]
    if name not in ("chunk", "split", "split_with_sizes", "unbind") or x.pieces is None:
        return [Traced.of(out.shape, None) for out in outs]
    place = 1 if name == "unbind" else 2
    dim, start, made = _dim(x, args, kwargs, place), 0, []
    for out in outs:
        length = 1 if name == "unbind" else out.shape[dim]
        window = Box.whole(tuple(x.shape)).narrow(dim, start, start + length)
        parts = [part for piece in x.pieces if (part := _within(piece, window)) is not None]
        if name == "unbind":
            order = [number for number in range(x.dim()) if number != dim]
            parts = [_ordered(part, order) for part in parts]
        made.append(Traced.of(out.shape, parts))
        start += length
    return made


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


def file_links(model: Any, held: Sequence[Link], kind: str) -> list[Link]:
    """Return the links of our parameters to the tensors of files, from those to transformers' modules."""
    from transformers.core_model_loading import revert_weight_conversion

    pieces: dict[str, list[Piece]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for link in held:
        dims = tuple(range(len(link.ours_box.shape)))
        pieces.setdefault(link.hf, []).append(Piece(link.ours, link.ours_box, link.hf_box, dims))
        shapes[link.hf] = tuple(map(max, shapes.get(link.hf, (0,) * len(dims)), link.hf_box.stop))
    traced: dict[str, Tensor] = {name: Traced.of(shapes[name], parts) for name, parts in pieces.items()}
    try:
        written = revert_weight_conversion(model, traced)
    except Exception as error:  # whatever its rules raise
        first = str(error).strip().partition("\n")[0][:160]
        expected = "conversion rules that rename, split, stack and transpose"
        raise BadInput(kind, "files", expected=expected, found=f"{type(error).__name__}: {first}") from None
    return [link for name, tensor in written.items() for link in _links(name, tensor, kind)]


def _links(name: str, tensor: Tensor, kind: str) -> list[Link]:
    lost = BadInput(
        kind, name, expected="a tensor of files made by renaming, splitting, stacking and transposing",
        found="one that transformers makes otherwise",
    )  # fmt: skip
    if not isinstance(tensor, Traced) or tensor.pieces is None:
        raise lost
    links = []
    for piece in tensor.pieces:
        ours, dims = len(piece.box.shape), piece.dims
        plain = dims == tuple(range(ours - len(dims), ours)) and ours - len(dims) <= 1
        turned = dims == tuple(reversed(range(len(dims)))) and ours - len(dims) <= 1 and len(dims) > 1
        if not (plain or turned) or (ours > len(dims) and piece.box.shape[0 if plain else -1] != 1):
            raise lost
        links.append(Link(piece.ours, piece.box, name, piece.at, transpose=turned and not plain))
    return links
