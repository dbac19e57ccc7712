"""Multiply each group of rows with a matrix of its own: the product that experts consist of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional as F

from ...parallel_state.engine import accelerator
from ..cost import Tokens

#: Torch's kernel needs rows of both matrices that are a multiple of so many bytes.
_ALIGNED_BYTES = 16


class GroupSizes(Sequence[int]):
    """Hold the number of rows of each group, by ``ends_E``: int32, the row after the last of each group.

    The host waits for the device when the numbers are first asked for, unless it knows them (``sizes``).
    Torch's kernel needs the ends only.
    """

    def __init__(self, ends_E: Tensor, sizes: Sequence[int] | None = None) -> None:
        self.ends_E, self._sizes = ends_E, sizes

    @property
    def sizes(self) -> Sequence[int]:
        """Return the numbers of rows, on the host."""
        if self._sizes is None:
            ends = self.ends_E.tolist()
            self._sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return self._sizes

    def __len__(self) -> int:
        return len(self.ends_E)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self.sizes[index]


def grouped_mm(x_MD: Tensor, w_EFD: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute ``x W_e^T`` for the rows of each group: (M, D) and (E, F, D) give (M, F).

    ``counts``: the number of rows of each of the E groups, in order; they add up to M and may be 0. In bf16
    on a GPU from Ampere on, with D and F multiples of 8, this is torch's single kernel (``F.grouped_mm``),
    which takes ``GroupSizes`` from the device without the host waiting; elsewhere it is one product for each
    group, with the same numbers.
    """
    if not len(x_MD):  # a rank whose experts nobody chose: a kernel may refuse it, and the sizes are known
        return F.linear(x_MD, w_EFD[0])
    if has_kernel(x_MD, w_EFD):
        return by_kernel(x_MD, w_EFD, counts)
    groups = zip(x_MD.split([*counts]), w_EFD.unbind(), strict=True)
    return torch.cat([F.linear(rows, weight) for rows, weight in groups])


def grouped_making(tokens: Tokens, width: int, made: int, *, keeps: bool) -> float:
    """Return the bytes that ``grouped_mm`` itself holds: what it makes, twice without the kernel, and the
    rows that it is given, unless they are kept.
    """
    times = 1 if tokens.fused and kernel_takes(tokens.compute, width, made) else 2
    return tokens.bytes(times * made + width * (not keeps))


def stack_gradient(tokens: Tokens, stack: Tensor, *, trained: bool) -> float:
    """Return the bytes of the gradient of a ``stack`` of matrices, 0 if it is frozen."""
    return float(stack.numel() * tokens.compute * trained)


def grouped_gradient(
    tokens: Tokens,
    stack: Tensor,
    width: int,
    made: int,
    *,
    trained: bool,
    beside: float = 0.0,
    given_back: float = 0.0,
) -> float:
    """Return the bytes at the worst moment of ``grouped_mm``'s backward: the gradients of what it made and of
    its rows, of the ``stack`` of matrices, and those ``beside`` them, in numbers of a row. Without the kernel
    the gradients of the matrices are joined when all are there, and the rows that were kept for them, of
    ``given_back`` numbers, no more.
    """
    rows, gradient = tokens.bytes(width + beside), stack_gradient(tokens, stack, trained=trained)
    if tokens.fused and kernel_takes(tokens.compute, width, made):
        return rows + tokens.bytes(made) + gradient
    return rows + max(tokens.bytes(made) + gradient, 2 * gradient - tokens.bytes(given_back))


def has_kernel(x: Tensor, w: Tensor) -> bool:
    """Return whether ``grouped_mm`` is one kernel for these matrices."""
    return (
        x.dtype == w.dtype == torch.bfloat16
        and accelerator.has_grouped_products(x.device)
        and kernel_takes(x.element_size(), x.shape[-1], w.shape[1])
    )


def kernel_takes(size: int, *widths: int) -> bool:
    """Return whether torch's kernel takes rows of these widths, in numbers of ``size`` bytes."""
    return size == 2 and not any(width * size % _ALIGNED_BYTES for width in widths)


def by_kernel(x_MD: Tensor, w_EFD: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute ``grouped_mm`` in torch's one kernel; a CPU has one as well, for fp32 and 16 bits."""
    if isinstance(counts, GroupSizes):
        ends = counts.ends_E
    else:
        ends = torch.tensor(counts, device=x_MD.device).cumsum(0).to(torch.int32)
    y_MF = F.grouped_mm(x_MD, w_EFD.transpose(1, 2), offs=ends)
    if y_MF.requires_grad:  # of a sum it comes broadcast, which the kernel's backward refuses
        y_MF.register_hook(torch.Tensor.contiguous)
    return y_MF
