"""Run AdamW over the parameters that a rank stores; weight decay on matrices only, unless a group differs."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..parallel_state import declarations
from ..parallel_state.engine import AdamW, is_dtensor
from ..recipes.optimizer_sections import ParameterGroup


def make_adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    fused: bool = True,
    groups: Mapping[str, ParameterGroup] | None = None,
) -> torch.optim.AdamW:
    """Return PyTorch's AdamW over the trained parameters; matrices have weight decay, other parameters none.

    Works with any model. A parameter counts as a matrix by its whole shape, so the result is the same in
    every layout. ``groups``: for names of parameters, what is different for them. Source: Loshchilov and
    Hutter 2019.
    """
    stated = declarations(model)
    usual = ParameterGroup(match=".")
    sorted_out: dict[tuple[float, float, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = (groups or {}).get(name, usual)
            # Biases of experts, which are stacked, are vectors too.
            dims = len(stated[name].shape) - stated[name].experts
            decay = weight_decay if dims >= 2 else 0.0
            decay = decay if group.weight_decay is None else group.weight_decay
            # A fused kernel takes tensors of one mesh at a time; what is not declared is on a smaller one.
            mesh = parameter.device_mesh if is_dtensor(parameter) else None
            sorted_out.setdefault((group.lr_scale, decay, mesh), []).append(parameter)
    parts = [
        {"params": params, "weight_decay": decay, "lr_scale": scale}
        for (scale, decay, _), params in sorted_out.items()
    ]
    # A pipeline stage of which nothing is trained has one group with nothing in it; torch refuses none.
    parts = parts or [{"params": [], "weight_decay": 0.0, "lr_scale": 1.0}]
    return AdamW(parts, lr=lr, betas=betas, eps=eps, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set each group's rate for the next step: ``lr`` times its ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
