"""Compare two sources of weights tensor by tensor, across layouts and forms, in bounded memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parallel_state import BadInput
from ..storage.catalog import LazyTensor, Seen
from .source import Source


@dataclass(frozen=True, slots=True)
class Difference:
    """Describe how a tensor differs: ``what`` in words, and figures over all elements, or NaN.

    ``absolute``: the largest absolute difference. ``relative``: the largest absolute difference divided by
    the largest element of the first tensor. ``elements``: the number of elements that differ.
    """

    name: str
    what: str
    absolute: float = float("nan")
    relative: float = float("nan")
    elements: int = 0


def differences(a: Source, b: Source, seen: Seen | None = None) -> Iterator[Difference]:
    """Yield the tensors in which two sources differ, in the order of the first; equal means bit for bit.

    Names are trilith's, unless both sources are Hugging Face folders. Moments are compared if both have them.
    ``seen``: the checksums of files into which what is read is counted (see ``verifying``).
    """
    if a.described.model_type != b.described.model_type:
        raise BadInput(b.path, "model_type", expected=a.described.model_type, found=b.described.model_type)
    as_hf = a.manifest is None and b.manifest is None
    first, second = ((source.hf if as_hf else source.ours) for source in (a, b))
    both_train = a.moments and b.moments
    for name, tensor in first.items():
        if name.startswith("optimizer.") and not both_train:
            continue
        if name not in second:
            yield Difference(name, f"only in {a.path}")
        elif second[name].shape != tensor.shape:
            yield Difference(name, f"shape {list(tensor.shape)} and {list(second[name].shape)}")
        else:
            yield from _compare(tensor, second[name], seen)
    for name in second:
        if name not in first and (both_train or not name.startswith("optimizer.")):
            yield Difference(name, f"only in {b.path}")


def _most(numbers: Tensor) -> float:
    """Return the largest absolute value; 0 if there is no number."""
    return float(numbers.abs().max()) if numbers.numel() else 0.0


def _compare(a: LazyTensor, b: LazyTensor, seen: Seen | None) -> Iterator[Difference]:
    name, dtypes = a.name, (a.dtype, b.dtype)
    worst, largest, count = 0.0, 0.0, 0
    for x, y in zip(a.in_blocks(seen), b.in_blocks(seen), strict=True):
        # A scalar has bytes as well, after reshape.
        same = x.dtype == y.dtype and torch.equal(*(z.reshape(-1).view(torch.uint8) for z in (x, y)))
        x, y = x.double(), y.double()
        largest = max(largest, _most(x))
        if not same:
            differ = (x != y) & ~(x.isnan() & y.isnan())
            count += int(differ.sum())
            worst = max(worst, _most((x - y)[differ]))
    if dtypes[0] != dtypes[1]:
        what = f"{dtypes[0]} and {dtypes[1]}" + (", other numbers" if count else ", the same numbers")
        yield Difference(name, what, worst, worst / largest if largest else 0.0, count)
    elif count:
        yield Difference(name, "other numbers", worst, worst / largest if largest else float("inf"), count)
