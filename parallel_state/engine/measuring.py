"""Measure how long a rank waits in collectives, and ask torch's flight recorder which ones it has called."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import collectives
from .accelerator import is_accelerator, synchronize
from .autograd_and_compiler import replaced
from .fully_sharded import watched

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


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
    waited, thread = Waited(), threading.get_ident()
    on_host = not is_accelerator(device)
    settle = (lambda: None) if on_host else partial(synchronize, device)

    def timed(owner: Any, name: str) -> Callable[..., Any]:
        call = getattr(owner, name)

        def wait(*args: Any, **options: Any) -> Any:
            if on_host and threading.get_ident() != thread:
                return call(*args, **options)
            settle()
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                settle()
                waited.seconds += time.perf_counter() - began

        return wait

    places: list[tuple[Any, str]] = [(dist.Work, "wait"), (collectives, "wait_tensor")]
    with replaced(places[:1] if compiled else places, timed):
        yield waited


#: Where NCCL's own watchdog writes when a collective times out: a path that a rank's number follows.
_DUMP_PLACE = "TORCH_FR_DUMP_TEMP_FILE"


def group_ranks() -> dict[str, list[int]]:
    """Return the ranks of each process group by the group's name; gloo's records do not have them."""
    names = dist.distributed_c10d._pg_names
    return {name: dist.get_process_group_ranks(group) for group, name in names.items()}


def recorded_collectives() -> dict[str, str]:
    """Return torch's records as JSON texts by backend: ``gloo``, and ``nccl`` where it is built in."""
    c10d = torch._C._distributed_c10d
    kinds = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    return {name: getattr(c10d, call)(True, False) for name, call in kinds.items() if hasattr(c10d, call)}


@contextmanager
def dump_on_timeout(prefix: str) -> Iterator[None]:
    """Let NCCL's watchdog, which ends the process when a collective times out, first write its records to
    ``prefix`` and the rank's number. It begins before the process group is made. What is set stays.
    """
    variables = {_DUMP_PLACE: prefix, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    unset = variables.keys() - os.environ.keys()
    os.environ.update({name: variables[name] for name in unset})
    try:
        yield
    finally:
        for name in unset:
            os.environ.pop(name, None)


@contextmanager
def clocked(modules: Iterable[FSDPModule]) -> Iterator[dict[str, float]]:
    """Add up the seconds in which these modules gather weights, ``all_gather``, and sum gradients,
    ``reduce_scatter``, while the block runs: with FSDP's copies and the wait for late ranks.
    """
    spent = {"all_gather": 0.0, "reduce_scatter": 0.0}

    @contextmanager
    def timed(kind: str, parameters: object) -> Iterator[None]:
        began = time.perf_counter()
        yield
        spent[kind] += time.perf_counter() - began

    with watched(modules, timed):
        yield spent
