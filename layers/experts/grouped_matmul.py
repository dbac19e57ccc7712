"""Multiply each group of rows with a matrix of its own: the product that experts consist of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

#: Torch's kernel needs rows of both matrices that are a multiple of so many bytes.
_ALIGNED_BYTES = 16


def grouped_mm(x_MD: Tensor, w_EFD: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute ``x W_e^T`` for the rows of each group: (M, D) and (E, F, D) give (M, F).

    ``counts``: the number of rows of each of the E groups, in order; they add up to M and may be 0. In bf16
    on a GPU from Ampere on, with D and F multiples of 8, this is torch's single kernel (``F.grouped_mm``);
    elsewhere it is one product for each group, with the same numbers.
    """
    if _has_kernel(x_MD, w_EFD):
        return by_kernel(x_MD, w_EFD, counts)
    groups = zip(x_MD.split([*counts]), w_EFD.unbind(), strict=True)
    return torch.cat([F.linear(rows, weight) for rows, weight in groups])


def _has_kernel(x: Tensor, w: Tensor) -> bool:
    return (
        x.device.type == "cuda"
        and x.dtype == w.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and kernel_takes(x.element_size(), x.shape[-1], w.shape[1])
    )


def kernel_takes(size: int, *widths: int) -> bool:
    """Return whether torch's kernel takes rows of these widths, in numbers of ``size`` bytes."""
    return size == 2 and not any(width * size % _ALIGNED_BYTES for width in widths)


def by_kernel(x_MD: Tensor, w_EFD: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute ``grouped_mm`` in torch's one kernel; a CPU has one as well, for fp32 and 16 bits."""
    ends = torch.tensor(counts, device=x_MD.device).cumsum(0).to(torch.int32)
    y_MF = F.grouped_mm(x_MD, w_EFD.transpose(1, 2), offs=ends)
    if y_MF.requires_grad:  # of a sum it comes broadcast, which the kernel's backward refuses
        y_MF.register_hook(torch.Tensor.contiguous)
    return y_MF
