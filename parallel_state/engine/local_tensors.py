"""Reach the tensors that this rank stores, in a DTensor or in a nest, and change many of them at once."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_data(x: Tensor) -> Tensor:
    """Return what this rank stores of ``x``, sharing memory and outside autograd."""
    here = x._local_tensor if isinstance(x, DTensor) else x
    return here.detach() if here.requires_grad else here


def like(parameter: Tensor, here: Tensor) -> Tensor:
    """Return this rank's piece ``here`` of a tensor that is cut as ``parameter`` is; its gradient, say."""
    if not isinstance(parameter, DTensor):
        return here
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(here, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def tensors_in(nest: Any) -> list[Tensor]:
    """Return the tensors in a nest of tuples, lists and dicts."""
    leaves: list[Any] = importlib.import_module("torch.utils._pytree").tree_leaves(nest)
    return [one for one in leaves if isinstance(one, Tensor)]


def foreach_norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of each tensor, in ``dtype``; few kernels for all of them."""
    return list(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors, which have one dtype, by one number of that dtype, in place."""
    torch._foreach_mul_(list(tensors), factor)


def foreach_copy_(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into the tensor at its place."""
    if tensors:
        torch._foreach_copy_(list(tensors), list(values))
