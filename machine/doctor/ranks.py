"""Check that ranks reach each other: an all-reduce of two over gloo, and of all GPUs over NCCL."""

import os
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from ...parallel_state import Layout
from ...runs.launch import process_group
from ...system import counted
from ..child import in_ranks
from ..finding import Finding

GROUP = "ranks"
#: Seconds for the ranks to start, meet and add.
_WAIT = 60.0


def check_ranks() -> Iterator[Finding]:
    """Yield whether ranks on this machine add their numbers correctly, and in what time."""
    yield _all_reduce("cpu", 2)
    gpus = torch.cuda.device_count()
    if gpus > 1:
        yield _all_reduce("cuda", gpus)
    elif gpus == 1:
        yield Finding(GROUP, "all-reduce, NCCL", "ok", "not tried: it needs two GPUs, and one is here")


def _all_reduce(device: str, world: int) -> Finding:
    backend = "NCCL" if device == "cuda" else "gloo"
    ran = in_ranks(all_reduce, world, {"device": device}, seconds=_WAIT)
    if ran.error:
        todo = {
            "NCCL": "Set NCCL_DEBUG=INFO and run again; check /dev/shm and peer access above",
            "gloo": "Check that localhost resolves (/etc/hosts), and GLOO_SOCKET_IFNAME if it is set",
        }[backend]
        return Finding(
            GROUP, f"all-reduce, {backend}", "fault", f"{counted(world, 'rank')}: {ran.error}", todo
        )
    seconds, latency = ran.result["meet"], 1e6 * ran.result["seconds"]
    text = f"{counted(world, 'rank')} met in {seconds:.1f} s; 4 KiB take {latency:,.0f} us"
    return Finding(GROUP, f"all-reduce, {backend}", "ok", text)


def all_reduce(device: str) -> dict[str, float]:
    """Add the ranks' numbers; return the seconds to meet and those of one all-reduce. Raises if a sum is
    wrong.
    """
    world = int(os.environ["WORLD_SIZE"])
    began = time.perf_counter()
    with process_group(Layout.of(data=world), device=device, timeout=timedelta(seconds=_WAIT)) as state:
        numbers = torch.full((1024,), float(state.rank + 1), device=state.device)
        dist.all_reduce(numbers)
        total = float(numbers.sum())
        met = time.perf_counter() - began
        if total != 1024 * world * (world + 1) / 2:
            raise RuntimeError(f"the sum of {counted(world, 'rank')} is wrong: {total}")
        began, count = time.perf_counter(), 20
        for _ in range(count):
            dist.all_reduce(numbers)
        float(numbers[0])  # waits for the device
        return {"meet": met, "seconds": (time.perf_counter() - began) / count}
