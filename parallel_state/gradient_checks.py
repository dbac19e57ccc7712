"""Check that a step trains: every trained parameter has a gradient, and not all gradients are zero."""

import math
import re
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..system.errors import PeerFailed
from .engine import accelerator, local_data
from .state import ParallelState


class NotTrained(PeerFailed):
    """Report that a trained parameter has no gradient after backward, or that all gradients are zero. Exit
    code 3.
    """


def has_gradients(model: nn.Module) -> bool:
    """Tell whether any parameter of this rank has a gradient that is not zero."""
    return bool(_largest(model.parameters()))


def refuse_untrained(
    model: nn.Module,
    loss: float,
    counts: Sequence[float],
    *,
    unused: str | None = None,
    state: ParallelState | None = None,
) -> None:
    """Raise ``NotTrained``, naming parameters, if one parameter or all of them would not be trained.

    ``counts``: what ``GradientSums.count`` returns, summed over all ranks. All ranks must call this with the
    same numbers; then all raise alike. ``unused``: a pattern over names of parameters that a step may leave
    without a gradient. An expert that got no token has a gradient of zeros, and a rank's piece of a parameter
    may be empty: neither counts as missing. A loss of exactly zero, such as that of a step in which no label
    counts, may have zero gradients.
    """
    trained, missing = counts
    if missing:
        names = [name for name, parameter in _trained(model, unused).items() if parameter.grad is None]
        rank, name = _first(names, state)
        others = f" and {int(missing) - 1} more of all ranks'" if missing > 1 else ""
        raise NotTrained(
            f"rank {rank}: {name}{others}: trained, and without a gradient; nothing was updated. "
            "Freeze what the step does not use (requires_grad_(False))"
        )
    if not trained or loss == 0 or not math.isfinite(loss):
        return
    mine = _trained(model, unused)
    largest = _largest(mine.values())
    if state is not None and state.layout.world > 1:
        largest = largest.to(next((parameter.device for parameter in model.parameters()), state.device))
        dist.all_reduce(largest)
    if not largest:
        rank, name = _first([*mine], state)
        raise NotTrained(
            f"the loss is {loss:.6g} and every gradient is exactly zero, rank {rank}'s {name} among them; "
            "nothing was updated"
        )


def _largest(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return a scalar that is 0 only if every gradient on this rank is 0; on a GPU it is the largest
    element.
    """
    grads = [local_data(parameter.grad) for parameter in parameters if parameter.grad is not None]
    grads = [grad for grad in grads if grad.numel()]
    if all(accelerator.is_host(grad.device) for grad in grads):  # the first gradient says it, nearly always
        return torch.tensor(any(bool(grad.any()) for grad in grads), dtype=torch.float64)
    return torch.nn.utils.get_total_norm(grads, norm_type=float("inf")).double()


def _trained(model: nn.Module, unused: str | None) -> dict[str, nn.Parameter]:
    pattern = None if unused is None else re.compile(unused)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (pattern is None or not pattern.search(name))
    }


def _first(names: Sequence[str], state: ParallelState | None) -> tuple[int, str]:
    """Return the first rank that has such a parameter, and the first such name there."""
    here = next(iter(names), None)
    if state is None or state.layout.world == 1:
        return 0, str(here)
    everywhere: list[str | None] = [None] * state.layout.world
    dist.all_gather_object(everywhere, here)
    return next((rank, name) for rank, name in enumerate(everywhere) if name is not None)
