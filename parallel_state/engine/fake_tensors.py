"""Offer torch's tensors without numbers; apart, because importing them takes time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager


def make_fake(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:
    """Make a fake tensor of this form without asking ``mode``."""
    with in_kernel_invocation_manager(mode):
        elem = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, elem, device)


def view_of_fake(mode: FakeTensorMode, view: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return what an operator gives that views its first argument, a fake tensor, without ``mode``."""
    with in_kernel_invocation_manager(mode):
        views = view(*args, **kwargs)
    device = args[0].fake_device
    if isinstance(views, Tensor):
        return FakeTensor(mode, views, device)
    return type(views)(FakeTensor(mode, part, device) for part in views)
