"""Offer torch's tensors without numbers; apart, because importing them takes time."""

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager


def make_fake(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    base: FakeTensor | None = None,
    offset: int = 0,
) -> FakeTensor:
    """Make a fake tensor of this form without asking ``mode``; ``base``: whose storage it looks into."""
    with in_kernel_invocation_manager(mode):
        if base is None:
            elem = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            elem = torch.empty((0,), dtype=dtype, device="meta")
            elem.set_(base.untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, elem, device)
