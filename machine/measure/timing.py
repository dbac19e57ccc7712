"""Time work on a CPU or a GPU."""

import statistics
import time
from collections.abc import Callable

import torch

_CPU = torch.device("cpu")


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


class StepClock:
    """Time whole steps by calls of ``tick`` at the end of each, without making the host wait for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def tick(self) -> None:
        """Note the end of a step."""
        self._times.append(time.perf_counter())
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between one tick and the next."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            pairs = zip(self._events, self._events[1:], strict=False)
            return [float(a.elapsed_time(b)) / 1e3 for a, b in pairs]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]
