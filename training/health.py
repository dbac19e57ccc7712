"""What stops a run: a loss or a gradient that is not a number, named by step, rank and parameter."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist
from torch import nn

from ..parallel_state import ParallelState, PeerFailed, first_not_finite


def name_the_culprit(model: nn.Module, step: int, state: ParallelState) -> NoReturn:
    """Loss and norm are the same on every rank, so all come here, before the update.

    ``step`` counts from 1.
    """
    mine = first_not_finite(model)
    found: list[str | None] = [None] * state.layout.world
    dist.all_gather_object(found, mine)
    first = next(
        (f"rank {rank}: the gradient of {name}" for rank, name in enumerate(found) if name), "the loss"
    )
    raise PeerFailed(f"step {step}: {first} is not finite; nothing was updated")
