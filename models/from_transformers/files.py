"""Read from transformers how the tensors of files become those of its modules, as links, without weights.

transformers' own conversion (``revert_weight_conversion``: renamed, split, stacked, transposed) runs on
tensors without memory. What a view shows of a tensor follows from its strides, and of what copies are made is
noted. An operation that keeps no boxes refuses.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...parallel_state import BadInput, Box, Piece
from ..base.config import ModelConfig
from ..base.family import Family, making
from ..base.hugging_face_names import Link, shapes_of
from .config import AdoptedConfig, in_one_line
from .probe import on_meta

#: What makes a tensor of the same elements, or gives back the one that it is given.
_COPIES = ("contiguous", "clone", "detach", "to", "cpu")


class Tracer(TorchFunctionMode):
    """Know what the tensors hold that torch's functions make in its block.

    ``links_of``: of tensors that are no views, links of our parameters to them, none where they are lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.links_of = dict[Tensor, list[Link]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out, name = func(*args, **kwargs), getattr(func, "__name__", "")
        if isinstance(out, Tensor) and out._base is None and out not in self.links_of:
            if name in ("cat", "concat"):
                dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % out.dim()
                self.links_of[out] = self._joined(args[0], dim)
            else:
                self.links_of[out] = self.links(args[0]) if name in _COPIES else []
        return out

    def _joined(self, parts: Sequence[Tensor], dim: int) -> list[Link]:
        links_of_parts, start = [self.links(part) for part in parts], [0] * parts[0].dim()
        links = list[Link]()
        for part, part_links in zip(parts, links_of_parts, strict=True):
            links += _through(part_links, Piece.plain(Box.whole(tuple(part.shape)), "", tuple(start)))
            start[dim] += part.shape[dim]
        return links if all(links_of_parts) else []

    def links(self, x: Tensor, name: str = "") -> list[Link]:
        """Return the links of our parameters to a tensor, called ``name``; none if they are lost."""
        base = x if x._base is None else x._base
        piece = _seen(x, base, name)
        return [] if piece is None else _through(self.links_of.get(base, []), piece)


def _through(links: Sequence[Link], part: Piece[str]) -> list[Link]:
    """Return the links to what holds the elements of a part of the tensor that ``links`` lead to."""
    return [Link(link.ours, piece) for link in links if (piece := link.piece.through(part)) is not None]


def _seen(view: Tensor, base: Tensor, name: str) -> Piece[str] | None:
    """Return where the elements of ``base`` lie in a view of it, or nothing where dims are merged or cut."""
    if view is base:
        return Piece.plain(Box.whole(tuple(base.shape)), name)
    offset, start = int(view.storage_offset() - base.storage_offset()), [0] * base.dim()
    for dim in sorted(range(base.dim()), key=base.stride, reverse=True):
        start[dim], offset = divmod(offset, base.stride(dim))
    stop, dims = [first + 1 for first in start], list[int | None]([None] * base.dim())
    by_stride = {base.stride(dim): dim for dim in range(base.dim()) if base.shape[dim] > 1}
    for along, size in enumerate(view.shape):
        if size > 1:
            of_base = by_stride.get(view.stride(along))
            if of_base is None or start[of_base] + size > base.shape[of_base]:
                return None
            stop[of_base], dims[of_base] = start[of_base] + size, along
    return Piece(Box(tuple(start), tuple(stop)), name, (0,) * view.dim(), tuple(dims), (1,) * base.dim())


def held_links(family: Family, config: ModelConfig) -> list[Link]:
    """Return the links between trilith's tensors and those of transformers' modules."""
    model: Any = family.on_meta(config)
    links, tied = list[Link](), getattr(model.hf, "all_tied_weights_keys", None) or {}
    for name, declaration in family.declarations(config)[0].items():
        hf, dim, number = model.fused.get(name, (tied.get(name, name), 0, 0))
        start = (number * size if axis == dim else 0 for axis, size in enumerate(declaration.shape))
        links.append(Link(name, Piece.plain(Box.whole(declaration.shape), hf, tuple(start))))
    return links


@lru_cache(maxsize=4)
def _theirs(config: AdoptedConfig) -> Any:
    """Return transformers' model without memory, as it reads and writes files. It is shared."""
    with making(torch.bfloat16, "cpu"):
        return on_meta(config, ours=False)


@lru_cache(maxsize=16)
def file_links(family: Family, config: AdoptedConfig) -> tuple[list[Link], dict[str, tuple[int, ...]]]:
    """Return the links to the tensors of files, the embedding's first, and the shapes of these tensors.

    Raises ``BadInput`` for a tensor of files that is made otherwise than by renaming, splitting, stacking and
    transposing, and for a parameter that no tensor of files holds.
    """
    from transformers.core_model_loading import revert_weight_conversion

    kind, ours, tracer, links = family.model_type, held_links(family, config), Tracer(), list[Link]()
    model = _theirs(config)
    with torch.device("meta"):
        traced = {name: torch.empty(shape) for name, shape in shapes_of(ours).items()}
    for link in ours:
        tracer.links_of.setdefault(traced[link.hf], []).append(link)
    expected = "conversion rules that rename, split, stack and transpose"
    with in_one_line(kind, "files", expected=expected), tracer:
        in_files = revert_weight_conversion(model, traced)
    for name, tensor in in_files.items():
        if not (of_tensor := tracer.links(tensor, name)):
            expected = "a tensor of files made by renaming, splitting, stacking and transposing"
            raise BadInput(kind, name, expected=expected, found="one that transformers makes otherwise")
        links += of_tensor
    for name in sorted({link.ours for link in ours} - {link.ours for link in links}):
        expected, actual = "a tensor of files that holds it", "none, by transformers' rules"
        raise BadInput(kind, name, expected=expected, found=actual)
    embedding = model.get_input_embeddings().weight
    first = next(name for name, parameter in model.named_parameters() if parameter is embedding)
    links.sort(key=lambda link: link.ours != first)
    return links, shapes_of(links)


def module_pieces(family: Family, config: AdoptedConfig) -> dict[str, list[Piece[str]]]:
    """Return where transformers' modules, whose names files may have instead, hold each tensor of files."""
    of_modules, pieces = dict[str, list[Piece[str]]](), dict[str, list[Piece[str]]]()
    for link in held_links(family, config):
        of_modules.setdefault(link.ours, []).append(link.piece)
    for link in file_links(family, config)[0]:
        parts = map(link.piece.reversed(link.ours).through, of_modules[link.ours])
        pieces.setdefault(link.hf, []).extend(part for part in parts if part is not None)
    return pieces


def left_out(config: AdoptedConfig, names: Collection[str]) -> set[str]:
    """Return those of these names of no parameter in files that transformers does not read: buffers, as in
    files of earlier versions, and what the class lists, such as blocks that predict further tokens.
    """
    model, info = _theirs(config), SimpleNamespace(missing_keys=set(), unexpected_keys=set(names))
    with in_one_line(config.model_type, "files", expected="a class that says what it does not read"):
        model._adjust_missing_and_unexpected_keys(info)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name for name in names if name in buffers or name not in info.unexpected_keys}
