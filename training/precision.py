"""Define the data types in which a step computes, sums gradients, and keeps its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True, slots=True)
class Precision:
    """State three dtypes: ``master`` of weights and moments, ``compute`` of forward and backward, and
    ``reduce`` of the sums of gradients over micro-batches and ranks.
    """

    master: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @property
    def casts(self) -> bool:
        """Tell whether the three differ."""
        return not self.master == self.compute == self.reduce

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """Return FSDP2's policy, which casts weights on all-gather and gradients before they are summed."""
        from torch.distributed.fsdp import MixedPrecisionPolicy  # half a second

        return MixedPrecisionPolicy(
            param_dtype=self.compute if self.compute != self.master else None,
            reduce_dtype=self.reduce if self.reduce != self.compute else None,
            cast_forward_inputs=False,
        )
