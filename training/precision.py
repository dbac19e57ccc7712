"""In which number formats a step computes, reduces gradients, and keeps its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..parallel_state import BadInput

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_named(name: str, where: str = "recipe", key: str = "dtype") -> torch.dtype:
    """The torch dtype with this name, or ``BadInput``."""
    if name not in DTYPES:
        raise BadInput(where, key, expected=f"one of {', '.join(DTYPES)}", found=repr(name))
    return DTYPES[name]


@dataclass(frozen=True, slots=True)
class Precision:
    """``master``: weights and moments; ``compute``: forward and backward; ``reduce``: sums of gradients over
    micro-batches and ranks.
    """

    master: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """FSDP2's policy: it casts weights on all-gather and gradients before reduce."""
        return MixedPrecisionPolicy(
            param_dtype=self.compute if self.compute != self.master else None,
            reduce_dtype=self.reduce if self.reduce != self.compute else None,
            cast_forward_inputs=False,
        )
