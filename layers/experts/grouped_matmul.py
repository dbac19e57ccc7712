"""Multiply each group of rows with a matrix of its own: the product that experts consist of."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...parallel_state.engine import accelerator

#: Torch's kernel needs rows of both matrices that are a multiple of this many bytes.
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

    def __getitem__(self, index: Any) -> Any:
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


def has_kernel(x: Tensor, w: Tensor) -> bool:
    """Return whether ``grouped_mm`` is one kernel for these matrices."""
    return (
        x.dtype == w.dtype == torch.bfloat16
        and accelerator.has_grouped_products(x.device)
        and not any(width * x.element_size() % _ALIGNED_BYTES for width in (x.shape[-1], w.shape[1]))
    )


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
