"""AdamW over what this rank stores, with weight decay on matrices only; the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from ..parallel_state import BadInput, declarations


def make_adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    fused: bool = True,
) -> torch.optim.AdamW:
    """PyTorch's AdamW in two groups: matrices decay; biases, norms and other vectors do not.

    Which is which follows from the whole shape, so it is the same in every layout. Source: Loshchilov and
    Hutter 2019.
    """
    stated = declarations(model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if len(stated[name].shape) >= 2]
    vectors = [p for name, p in named if len(stated[name].shape) < 2]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, weight_decay), (vectors, 0.0))
        if params
    ]
    # A pipeline stage may hold nothing that is trained.
    return torch.optim.AdamW(groups or [{"params": []}], lr=lr, betas=betas, eps=eps, fused=fused)


def cosine(step: int, *, peak: float, warmup: int, total: int, minimum: float = 0.0) -> float:
    """Linear warm-up to ``peak`` over ``warmup`` steps, then half a cosine down to ``minimum`` at ``total``.

    ``step`` counts from 0; the first step already learns. Source: Loshchilov and Hutter 2017.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return minimum + (peak - minimum) * 0.5 * (1 + math.cos(math.pi * progress))


def constant(step: int, *, peak: float, warmup: int, total: int, minimum: float = 0.0) -> float:
    """Linear warm-up, then ``peak``."""
    return peak * (step + 1) / warmup if step < warmup else peak


SCHEDULES: dict[str, Callable[..., float]] = {"cosine": cosine, "constant": constant}


def learning_rate(name: str, step: int, *, peak: float, warmup: int, total: int, minimum: float) -> float:
    """The rate of ``step`` under the schedule with this name: a function of the step alone."""
    if name not in SCHEDULES:
        raise BadInput("recipe", "schedule", expected=f"one of {', '.join(SCHEDULES)}", found=repr(name))
    return SCHEDULES[name](step, peak=peak, warmup=warmup, total=total, minimum=minimum)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
