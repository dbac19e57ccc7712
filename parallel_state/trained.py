"""Check that a step trains: every trained parameter has a gradient, and not all gradients are zero."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .engine import local_data
from .errors import PeerFailed
from .state import ParallelState


class NotTrained(PeerFailed):
    """Report that a trained parameter has no gradient after backward, or that all gradients are zero. Exit
    code 3.
    """


def signs_of_training(model: nn.Module, *, unused: str | None = None) -> Tensor:
    """Return three numbers of this rank, to be summed over all ranks, in fp64 on the device of the gradients.

    They are the number of trained parameters, the number of those without a gradient, and the largest element
    of the gradients. ``unused``: a pattern over names of parameters that a step may leave without a gradient.
    An expert that got no token has a gradient of zeros, and a rank's piece of a parameter may be empty:
    neither counts as missing.
    """
    trained = _trained(model, unused)
    missing = sum(one.grad is None for one in trained.values())
    grads = [local_data(one.grad) for one in trained.values() if one.grad is not None]
    grads = [grad for grad in grads if grad.numel()]
    counts = torch.tensor([len(trained), missing], dtype=torch.float64)
    if not grads:
        return torch.cat([counts, torch.zeros_like(counts[:1])])
    largest = torch.nn.utils.get_total_norm(grads, norm_type=float("inf")).double().view(1)
    return torch.cat([counts.to(largest.device), largest])


def has_gradients(model: nn.Module) -> bool:
    """Tell whether any parameter of this rank has a gradient that is not zero."""
    found = [one.grad for one in model.parameters() if one.grad is not None]
    return any(bool(local_data(grad).any()) for grad in found)


def refuse_untrained(
    model: nn.Module,
    loss: float,
    signs: Sequence[float],
    *,
    unused: str | None = None,
    state: ParallelState | None = None,
) -> None:
    """Raise ``NotTrained``, naming parameters, if one parameter or all of them would not be trained.

    ``signs``: the numbers of ``signs_of_training``, summed over all ranks; all ranks must call this with the
    same numbers, and all raise alike. A loss of exactly zero, such as that of a step in which no label
    counts, may have zero gradients.
    """
    trained, missing, largest = signs
    if missing:
        names = [name for name, one in _trained(model, unused).items() if one.grad is None]
        rank, found = _first(names, state)
        more = f" and {int(missing) - 1} more of all ranks'" if missing > 1 else ""
        raise NotTrained(
            f"rank {rank}: {found}{more}: trained, and without a gradient; nothing was updated. "
            "Freeze what the step does not use (requires_grad_(False))"
        )
    if trained and largest == 0 and loss != 0 and math.isfinite(loss):
        rank, found = _first([*_trained(model, unused)], state)
        raise NotTrained(
            f"the loss is {loss:.6g} and every gradient is exactly zero, rank {rank}'s {found} among them; "
            "nothing was updated"
        )


def _trained(model: nn.Module, unused: str | None) -> dict[str, nn.Parameter]:
    pattern = None if unused is None else re.compile(unused)
    return {
        name: one
        for name, one in model.named_parameters()
        if one.requires_grad and (pattern is None or not pattern.search(name))
    }


def _first(names: Sequence[str], state: ParallelState | None) -> tuple[int, str]:
    """Return the first rank that has such a parameter, and the first such name there."""
    here = next(iter(names), None)
    if state is None or state.layout.world == 1:
        return 0, str(here)
    everywhere: list[str | None] = [None] * state.layout.world
    dist.all_gather_object(everywhere, here)
    return next((rank, name) for rank, name in enumerate(everywhere) if name is not None)
