"""Find the tensors in what an operator is given or returns."""

from collections.abc import Iterable
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
    if isinstance(value, list | tuple | dict):
        _collect(value, tensors)
    return tensors


def _collect(nest: Iterable[Any], tensors: list[Tensor]) -> None:
    for element in nest.values() if isinstance(nest, dict) else nest:
        if isinstance(element, Tensor):
            tensors.append(element)
        elif isinstance(element, list | tuple | dict):
            _collect(element, tensors)
