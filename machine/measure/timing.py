"""Time work on a CPU or a GPU, and say what a figure is."""

import statistics
import time
from collections.abc import Callable

import torch

_CPU = torch.device("cpu")

#: A figure is a number with its unit in its name ("tokens/s"), or a word; ``None`` if it is not finite.
Figures = dict[str, float | str | None]


def seconds_of(
    work: Callable[[], object], device: torch.device = _CPU, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of one call, the device's work included; on a CPU by this clock."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    began = clock()
    work()
    return clock() - began


def median_seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median of ``rounds`` calls, after two that do not count."""
    for _ in range(2):
        work()
    return statistics.median(seconds_of(work, device) for _ in range(rounds))
