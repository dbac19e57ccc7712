"""Compute the bytes of weights, gradients and optimizer state that a rank keeps for a model's parameters.

Sources: Micikevicius et al. 2018 (mixed precision); Rajbhandari et al. 2020 (ZeRO).
"""

from __future__ import annotations

from dataclasses import dataclass

#: AdamW beside 16-bit weights: fp32 weights and two fp32 moments.
MIXED_ADAMW = 4 + 4 + 4
#: AdamW without fp32 weights of its own: the two moments.
PLAIN_ADAMW = 4 + 4


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Hold the bytes on one rank between two steps; activations are not among them."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the three together."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(
    parameters: float,
    *,
    zero: int = 0,
    data_ranks: int = 1,
    weight_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = MIXED_ADAMW,
) -> StateBytes:
    """Return the bytes that a rank keeps for ``parameters``, those of its pipeline stage and tensor shard.

    The three sizes are bytes for each parameter. ZeRO 1 cuts the optimizer's state over the data ranks, 2
    the gradients too, and 3 (FSDP) the weights too.
    """
    cut = [data_ranks if zero >= stage else 1 for stage in (3, 2, 1)]
    sizes = (weight_bytes, gradient_bytes, optimizer_bytes)
    return StateBytes(*(parameters * size / ranks for size, ranks in zip(sizes, cut, strict=True)))
