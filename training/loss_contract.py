"""Check what ``ModuleStep`` asks of a loss, a sum over the samples and their number, at the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..parallel_state import BadInput
from ..parallel_state.engine import accelerator

_TODO = "Return (losses.sum(), how_many): the step divides by the counts of all micro-batches and data ranks"


def sum_and_count(returned: Any) -> tuple[Tensor, Tensor | int]:
    """Return the sum and the count that a loss returned; ``BadInput`` unless they are a scalar and a
    number.
    """
    pair = isinstance(returned, tuple) and len(returned) == 2
    if not pair or not isinstance(returned[0], Tensor) or returned[0].ndim or not _is_number(returned[1]):
        found = f"{type(returned).__name__} of {len(returned)}" if isinstance(returned, tuple) else None
        if pair:
            found = " and ".join(
                f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
                for one in returned
            )
        elif isinstance(returned, Tensor):
            found = f"one tensor of shape {tuple(returned.shape)}"
        raise BadInput(
            "step", "loss", expected="the sum of the losses, a scalar tensor, and their number",
            found=found or type(returned).__name__, todo=_TODO,
        )  # fmt: skip
    total, count = returned
    return total, count


def is_mean(loss: Callable[..., Any], given: Any, part: Mapping[str, Tensor]) -> bool | None:
    """Tell whether a loss wrongly returns a mean where it should return a sum, beside its count.

    The first sample is given once, and then twice. A sum is then twice as large, but a mean stays the same.
    Returns ``None`` if this test says nothing: no label of the first sample counts, the loss is zero, the
    count does not grow with the samples, or the model's output is not made of tensors with the samples on
    dim 0, in tuples or dicts.
    """
    tensors, size = [*_tensors(given)], len(next(iter(part.values())))
    if not tensors or any(not isinstance(one, Tensor) or not one.ndim or len(one) != size for one in tensors):
        return None
    found = []
    for times in (1, 2):
        with torch.no_grad(), accelerator.fork_random(tensors[0].device):  # a loss may draw numbers
            pieces = {name: torch.cat([one[:1]] * times) for name, one in part.items()}
            total, count = sum_and_count(loss(_first_sample(given, times), pieces))
            found.append((float(total), float(count)))
    (one, few), (two, many) = found
    if one == 0 or few == 0 or many != 2 * few:
        return None
    return abs(two - one) <= 1e-3 * abs(one)


def _tensors(given: Any) -> Iterator[Any]:
    inner = given.values() if isinstance(given, dict) else given if isinstance(given, tuple | list) else None
    if inner is None:
        yield given
    else:
        for one in inner:
            yield from _tensors(one)


def _first_sample(given: Any, times: int) -> Any:
    """Return the same nest of tuples and dicts; each tensor is its first sample, repeated so many times."""
    if isinstance(given, dict):
        return {key: _first_sample(one, times) for key, one in given.items()}
    if isinstance(given, tuple) and hasattr(given, "_fields"):
        return type(given)(*(_first_sample(one, times) for one in given))
    if isinstance(given, tuple | list):
        return type(given)(_first_sample(one, times) for one in given)
    return torch.cat([given.detach()[:1]] * times)


def refuse_mean() -> None:
    """Raise ``BadInput`` for a loss that returns a mean (see ``is_mean``); every rank must call this."""
    raise BadInput(
        "step", "loss", expected="the sum of the losses, with their number",
        found="a mean: one sample given twice has the same loss as once, and twice the count",
        todo=_TODO + ". A mean of means is (mean, 1)",
    )  # fmt: skip


def _is_number(count: Any) -> bool:
    if isinstance(count, Tensor):
        return count.ndim == 0
    return isinstance(count, int | float) and not isinstance(count, bool)
