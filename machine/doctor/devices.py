"""Check the GPUs: driver, memory and who uses it, their links; and that ranks reach each other."""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...parallel_state import Layout
from ...runs.launch import process_group
from ...simulation.model_flops import peak_named
from ...system import counted, whole_number
from ..child import in_ranks
from ..facts import Finding, driver, smi

GROUP = "devices"
_GB = 1e9
#: Share of a GPU's memory that other programs may hold without harm: the driver's own, a desktop's.
_USED_BY_OTHERS = 0.05


def check_devices() -> Iterator[Finding]:
    """Yield each GPU with its memory, and how the GPUs are linked; one line where there is none."""
    if not torch.cuda.is_available():
        text, todo = "none: recipes run on the CPU", ""
        if names := smi("-L").splitlines():
            text = f"torch sees none of {len(names)}"
            todo = "Install a CUDA build of torch, and check CUDA_VISIBLE_DEVICES"
        yield Finding.unless(GROUP, "GPU", text, todo, "fault")
        return
    version = driver()
    todo = "" if version else "Install nvidia-smi beside the driver, to see clocks, links and errors"
    yield Finding.unless(GROUP, "driver", version or "nvidia-smi does not answer", todo)
    ran = in_ranks(_gpus, 1, {}, seconds=120.0)
    if ran.error:
        todo = "Run nvidia-smi, and python -c 'import torch; torch.zeros(1).cuda()'"
        yield Finding(GROUP, "GPU", "fault", f"cannot be used: {ran.error}", todo)
        return
    for finding in ran.result["findings"]:
        yield Finding(**finding)
    if torch.cuda.device_count() > 1:
        yield from _links()


def _gpus() -> dict[str, Any]:
    """Return each GPU's findings as data: a process that has talked to a GPU keeps memory on it."""
    count = torch.cuda.device_count()
    return {"findings": [asdict(finding) for number in range(count) for finding in _gpu(number)]}


def _gpu(number: int) -> Iterator[Finding]:
    name = torch.cuda.get_device_name(number)
    free, total = torch.cuda.mem_get_info(number)
    major, minor = torch.cuda.get_device_capability(number)
    text = f"{name}, compute capability {major}.{minor}, {free / _GB:.1f} of {total / _GB:.1f} GB free"
    used = free < (1 - _USED_BY_OTHERS) * total
    todo = "End the programs that use it (nvidia-smi names them), or expect less room than a plan says"
    yield Finding.unless(GROUP, f"GPU {number}", text, todo if used else "")
    if major < 8:
        todo = 'Set compute = "float16", which has a loss scale'
        yield Finding(GROUP, f"GPU {number}: bf16", "warning", "no matrix products in bf16", todo)
    if peak_named(name) is None:
        todo = "Set watch.peak_flops in the recipe to the maker's number"
        yield Finding(GROUP, f"GPU {number}: peak", "warning", "FLOP/s not known, so runs show no MFU", todo)
    query = "ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"
    errors, _, slow = smi(f"--query-gpu={query}", "--format=csv,noheader", f"--id={number}").partition(", ")
    if whole_number(errors):
        todo = "Have the GPU reset or replaced: results may be wrong"
        yield Finding(GROUP, f"GPU {number}: memory", "fault", f"{errors} uncorrected errors", todo)
    if slow == "Active":
        todo = "Check power and cooling: the hardware lowers the clock"
        yield Finding(GROUP, f"GPU {number}: clock", "warning", "slowed down by the hardware", todo)


def _links() -> Iterator[Finding]:
    """Yield the kind of link between the GPUs, and whether they reach each other's memory."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    kinds = link_kinds(smi("topo", "-m"))
    links = ", ".join(sorted(kinds)) or "kind not known"
    todo = ""
    if apart:
        links += f"; no peer access between {', '.join(apart[:4])}"
        todo = "Collectives go through the host's memory: check IOMMU and ACS settings, and the container's"
    elif kinds and not all(kind.startswith("NV") for kind in kinds):
        todo = "Tensor parallelism wants NVLink: prefer data or pipeline parallelism over these links"
    yield Finding.unless(GROUP, "links", links if todo else f"{links}, peer access between all", todo)


def link_kinds(topology: str) -> set[str]:
    """Return the kinds of links (NV18, PIX, SYS) between GPUs in the table of ``nvidia-smi topo -m``."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    head = next((line.split() for line in plain.splitlines() if line.strip().startswith("GPU0")), [])
    columns = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in head)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    return {kind for row in rows for kind in row[1 : columns + 1] if kind != "X"}


RANKS = "ranks"
#: Seconds for the ranks to start, meet and add.
_WAIT = 60.0


def check_ranks() -> Iterator[Finding]:
    """Yield whether ranks on this machine add their numbers correctly, and in what time."""
    yield _all_reduce("cpu", 2)
    gpus = torch.cuda.device_count()
    if gpus > 1:
        yield _all_reduce("cuda", gpus)
    elif gpus == 1:
        yield Finding(RANKS, "all-reduce, NCCL", "ok", "not tried: it needs two GPUs, and one is here")


def _all_reduce(device: str, world: int) -> Finding:
    backend = "NCCL" if device == "cuda" else "gloo"
    ran = in_ranks(all_reduce, world, {"device": device}, seconds=_WAIT)
    if ran.error:
        todo = {
            "NCCL": "Set NCCL_DEBUG=INFO and run again; check /dev/shm and peer access above",
            "gloo": "Check that localhost resolves (/etc/hosts), and GLOO_SOCKET_IFNAME if it is set",
        }[backend]
        text = f"{counted(world, 'rank')}: {ran.error}"
        return Finding(RANKS, f"all-reduce, {backend}", "fault", text, todo)
    seconds, latency = ran.result["meet"], 1e6 * ran.result["seconds"]
    text = f"{counted(world, 'rank')} met in {seconds:.1f} s; 4 KiB take {latency:,.0f} us"
    return Finding(RANKS, f"all-reduce, {backend}", "ok", text)


def all_reduce(device: str) -> dict[str, float]:
    """Add the ranks' numbers; return the seconds to meet and of one all-reduce. Raises for a wrong sum."""
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
