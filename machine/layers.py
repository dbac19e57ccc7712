"""Measure what the parallel layers add to ``torch.nn.Linear`` on one tensor rank: time and kernels."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ..layers import ColumnParallelLinear, RowParallelLinear
from ..testing import Operators
from .row import Figures
from .timing import seconds_of


class Mlp(nn.Module):
    """Compute two linears with an activation between: x (tokens, width) to the same shape."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


def layer_overhead(device: str, width: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Time forward and backward of an MLP of our layers and of one of torch.nn's, in turn, in bf16."""
    here = torch.device(device)
    ours = Mlp(
        ColumnParallelLinear(width, 4 * width, bias=False), RowParallelLinear(4 * width, width, bias=False)
    )
    theirs = Mlp(nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False))
    for module in (ours, theirs):
        module.to(here, torch.bfloat16)
    x = torch.randn(1, tokens, width, device=here, dtype=torch.bfloat16, requires_grad=True)
    counts = [_operators(module, x) for module in (ours, theirs)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 3):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            module = (ours, theirs)[which]
            taken = seconds_of(partial(_once, module, x), here)
            if number >= 3:
                seconds[which].append(taken)
    added = statistics.median(a - b for a, b in zip(*seconds, strict=True))
    figures: Figures = {
        "torch.nn: us": statistics.median(seconds[1]) * 1e6,
        "added by ours: us": added * 1e6,
        "ours by torch.nn's": statistics.median(a / b for a, b in zip(*seconds, strict=True)),
        "operators, ours": counts[0],
        "operators, torch.nn": counts[1],
    }
    if here.type == "cuda":
        figures |= {"kernels, ours": _kernels(ours, x), "kernels, torch.nn": _kernels(theirs, x)}
    return {"figures": figures, "note": f"{tokens:,} tokens, MLP {width:,} to {4 * width:,} and back, bf16"}


def _once(module: nn.Module, x: Tensor) -> None:
    module(x).sum().backward()


def _operators(module: nn.Module, x: Tensor) -> int:
    _once(module, x)
    with Operators() as seen:
        _once(module, x)
    return len(seen.names)


def _kernels(module: nn.Module, x: Tensor) -> int:
    """Count the kernels and copies that the GPU runs for one forward and backward."""
    _once(module, x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        _once(module, x)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())
