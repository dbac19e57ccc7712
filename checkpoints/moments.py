"""Name the optimizer's tensors in a training checkpoint, begin them, and count their updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel_state import ParallelState
from ..parallel_state.collective_errors import together
from ..parallel_state.engine import local_data

#: AdamW's running means of the gradient and of its square; each lies exactly as its parameter does.
MOMENTS = ("exp_avg", "exp_avg_sq")


def moment_name(moment: str, parameter: str) -> str:
    """Return the checkpoint's name of an optimizer moment."""
    return f"optimizer.{moment}.{parameter}"


def begin_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, memory: Mapping[str, Any] | None = None
) -> None:
    """Make zero moments for every trained parameter, after as many updates as ``memory`` says.

    ``memory`` has ``updates``, the number of updates so far, and in ``updates_of`` the number for a parameter
    that steps have left out. AdamW makes its moments at its first update; if that step is skipped, there must
    be moments to save too.
    """
    said = memory or {}
    updates, of = said.get("updates", 0), said.get("updates_of", {})
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kept = optimizer.state[parameter]
        if memory is not None or not kept:
            device = local_data(parameter).device  # where fused AdamW looks for it
            kept["step"] = torch.tensor(float(of.get(name, updates)), dtype=torch.float32, device=device)
        for moment in MOMENTS:
            if moment not in kept:
                kept[moment] = torch.zeros_like(parameter, requires_grad=False)


def moment_of(optimizer: torch.optim.Optimizer, moment: str) -> Callable[[nn.Parameter], Tensor | None]:
    """Return a function from a parameter to its moment, for ``stored_parts``; a frozen parameter has none."""

    def choose(parameter: nn.Parameter) -> Tensor | None:
        value: Tensor | None = optimizer.state[parameter][moment] if parameter.requires_grad else None
        return value

    return choose


def together_updates(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, state: ParallelState
) -> dict[str, Any]:
    """Count the optimizer's updates, as a checkpoint records them.

    ``updates`` is how many updates it has made; ``updates_of``, if there, has the count of each parameter
    with fewer (some step left it out). Collective.
    """

    def here() -> dict[str, int]:
        known = {} if optimizer is None else optimizer.state
        return {name: int(known[one]["step"]) for name, one in model.named_parameters() if one in known}

    everywhere = together(here, world=state.layout.world, group=state.file_group)
    made = {name: count for counts in everywhere for name, count in counts.items()}
    most = max(made.values(), default=0)
    fewer = {name: count for name, count in sorted(made.items()) if count != most}
    return {"updates": most, **({"updates_of": fewer} if fewer else {})}
