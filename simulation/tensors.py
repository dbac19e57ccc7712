"""Find the tensors in what an operator is given or returns."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

#: What torch calls to ask for the device of a tensor without numbers: half of all calls.
DEVICE = torch.ops.prim.device.default


def device_of(tensor: Tensor) -> torch.device:
    """Return a tensor's device; torch would ask every mode for that of a fake one."""
    device: torch.device | None = getattr(tensor, "fake_device", None)
    return tensor.device if device is None else device


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts; modes ask this at every operator."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    if isinstance(value, (list, tuple, Mapping)):
        _collect(value, tensors)
    return tensors


def _collect(nest: Iterable[Any] | Mapping[Any, Any], tensors: list[Tensor]) -> None:
    for element in nest.values() if isinstance(nest, Mapping) else nest:
        if isinstance(element, Tensor):
            tensors.append(element)
        elif isinstance(element, (list, tuple, Mapping)):
            _collect(element, tensors)


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested lists, tuples and dicts, with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(element, change) for key, element in value.items()}
    return (
        type(value)(with_tensors(element, change) for element in value)
        if type(value) in (list, tuple)
        else value
    )


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists and tuples among these."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += [inner for inner in value if isinstance(inner, Tensor)]
    return tensors
