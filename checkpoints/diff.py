"""Compare two sources of weights tensor by tensor, across layouts and forms, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..parallel_state import BadInput, Box
from .copies import Links
from .optimizer_state import moment_name
from .source import Source

_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Difference:
    """Describe how a tensor differs: ``what`` in words, and figures over all elements (NaN if they do not
    apply).

    ``absolute``: the largest absolute difference. ``relative``: the largest absolute difference divided by
    the largest element of the first tensor. ``elements``: the number of elements that differ.
    """

    name: str
    what: str
    absolute: float = float("nan")
    relative: float = float("nan")
    elements: int = 0


def differences(a: Source, b: Source) -> Iterator[Difference]:
    """Yield the tensors in which two sources differ, in the order of the first; equal means bit for bit, NaN
    included.

    Names are trilith's, unless both sources are Hugging Face folders. Moments are compared if both have them.
    """
    if a.described.model_type != b.described.model_type:
        raise BadInput(b.path, "model_type", expected=a.described.model_type, found=b.described.model_type)
    as_hf = a.manifest is None and b.manifest is None
    links = [source.links(to_hf=as_hf) for source in (a, b)]
    names_a, names_b = (_names(source, as_hf) for source in (a, b))
    both_train = a.moments and b.moments
    for name, shape in names_a.items():
        if name.startswith("optimizer.") and not both_train:
            continue
        if name not in names_b:
            yield Difference(name, f"only in {a.path}")
        elif names_b[name] != shape:
            yield Difference(name, f"shape {list(shape)} and {list(names_b[name])}")
        else:
            yield from _compare(name, shape, a, b, links)
    for name in names_b:
        if name not in names_a and (both_train or not name.startswith("optimizer.")):
            yield Difference(name, f"only in {b.path}")


def _names(source: Source, as_hf: bool) -> dict[str, tuple[int, ...]]:
    if source.manifest is not None or as_hf:
        return {name: whole.shape for name, whole in source.catalog.items()}
    (stated,) = source.described.declarations()
    shapes = {name: declaration.shape for name, declaration in stated.items()}
    return shapes | {
        moment_name(moment, name): shape for moment in source.moments for name, shape in shapes.items()
    }


def _compare(
    name: str, shape: tuple[int, ...], a: Source, b: Source, links: list[Links]
) -> Iterator[Difference]:
    dtypes = [source.dtype_of(name, source_links) for source, source_links in zip((a, b), links, strict=True)]
    worst, largest, count = 0.0, 0.0, 0
    for box in _slabs(shape):
        x, y = (
            source.read(name, box, source_links, finite=False)
            for source, source_links in zip((a, b), links, strict=True)
        )
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            largest = max(largest, float(x.double().abs().max()) if x.numel() else 0.0)
            continue
        x, y = x.double(), y.double()
        differ = (x != y) & ~(x.isnan() & y.isnan())
        count += int(differ.sum())
        worst = max(worst, float((x - y)[differ].abs().max()) if bool(differ.any()) else 0.0)
        largest = max(largest, float(x.abs().max()))
    if dtypes[0] != dtypes[1]:
        what = f"{dtypes[0]} and {dtypes[1]}" + (", other numbers" if count else ", the same numbers")
        yield Difference(name, what, worst, worst / largest if largest else 0.0, count)
    elif count:
        yield Difference(name, "other numbers", worst, worst / largest if largest else float("inf"), count)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor of any shape, a scalar among them."""
    return x.reshape(-1).view(torch.uint8)


def _slabs(shape: tuple[int, ...]) -> Iterator[Box]:
    whole = Box.whole(shape)
    if not shape:
        yield whole
        return
    rows = max(1, _ELEMENTS // max(1, whole.size // max(1, shape[0])))
    for start in range(0, shape[0], rows):
        yield whole.narrow(0, start, min(start + rows, shape[0]))
