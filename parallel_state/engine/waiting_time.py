"""Measure how long this rank waits in collectives during a block of code; outside it nothing is changed."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from . import collectives
from .accelerator import is_accelerator, synchronize


@dataclass
class Waited:
    """Hold the seconds that a rank has waited in collectives so far."""

    seconds: float = 0.0


@contextmanager
def waiting_time(device: torch.device, *, compiled: bool = False) -> Iterator[Waited]:
    """Add up the seconds in which this rank waits for collectives to end.

    Collectives of other threads do not count on a CPU: they are those of a save in the background. On a GPU
    the host waits for the device before and after each wait, so the block runs without overlap; ``compiled``
    code keeps its own collectives, which are then not seen.
    """
    waited, here = Waited(), threading.get_ident()
    settle = partial(synchronize, device) if is_accelerator(device) else None

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **options: Any) -> Any:
            if settle is None and threading.get_ident() != here:
                return call(*args, **options)
            if settle is not None:
                settle()
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                if settle is not None:
                    settle()
                waited.seconds += time.perf_counter() - began

        return wait

    places: list[tuple[Any, str]] = [
        (dist.Work, "wait"),
        *([] if compiled else [(collectives, "wait_tensor")]),
    ]
    before = [getattr(owner, name) for owner, name in places]
    try:
        for (owner, name), call in zip(places, before, strict=True):
            setattr(owner, name, timed(call))
        yield waited
    finally:
        for (owner, name), call in zip(places, before, strict=True):
            setattr(owner, name, call)
