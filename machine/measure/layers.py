"""Measure what the parallel layers add to ``torch.nn.Linear`` on one tensor rank: time and kernels."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ...layers import ColumnParallelLinear, RowParallelLinear
from ...testing import Operators
from .row import Figures
from .timing import in_pairs, seconds_of


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
    torch_mlp = Mlp(nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False))
    for module in (ours, torch_mlp):
        module.to(here, torch.bfloat16)
    x = torch.randn(1, tokens, width, device=here, dtype=torch.bfloat16, requires_grad=True)
    work = [partial(forward_and_backward, module, x) for module in (ours, torch_mlp)]
    counts = [_operators(run) for run in work]
    pairs = in_pairs(*(partial(seconds_of, run, here) for run in work), rounds=rounds)
    figures: Figures = {
        "torch.nn: us": statistics.median(b for _, b in pairs) * 1e6,
        "added by ours: us": statistics.median(a - b for a, b in pairs) * 1e6,
        "ours by torch.nn's": statistics.median(a / b for a, b in pairs),
        "operators, ours": counts[0],
        "operators, torch.nn": counts[1],
    }
    if here.type == "cuda":
        figures |= {"kernels, ours": _kernels(work[0]), "kernels, torch.nn": _kernels(work[1])}
    return {"figures": figures, "note": f"{tokens:,} tokens, MLP {width:,} to {4 * width:,} and back, bf16"}


def forward_and_backward(module: nn.Module, x: Tensor) -> None:
    module(x).sum().backward()


def _operators(work: Callable[[], None]) -> int:
    work()
    with Operators() as seen:
        work()
    return len(seen.names)


def _kernels(work: Callable[[], None]) -> int:
    """Count the kernels and copies that the GPU runs for one forward and backward."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())
