"""Check the host: memory, cores, shared memory, limits, the clock, and variables that matter."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from ...system import whole_number
from ...system.machine import memory_available, processor_name, usable_cores
from ..facts import Finding, said_by

GROUP, VARIABLES = "machine", "environment"
_GB = 1e9
#: Below these, something of a run is likely to fail.
_LEAST_MEMORY, _LEAST_SHARED, _LEAST_FILES, _LEAST_PROCESSES = 4e9, 64e6, 1024, 1024
#: Variables that change how a run behaves, shown where they are set.
_SHOWN = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "TORCH_COMPILE_DISABLE"),
    *("TORCH_DISTRIBUTED_DEBUG", "GLOO_SOCKET_IFNAME", "HF_HOME", "TMPDIR"),
)


def check_limits() -> Iterator[Finding]:
    """Yield the host's memory and cores, shared memory, limits, and whether its clock is set by others."""
    yield _memory()
    yield _cores()
    yield _shared_memory()
    yield _limit("open files", resource.RLIMIT_NOFILE, _LEAST_FILES, "ulimit -n 65536")
    yield _limit("processes", resource.RLIMIT_NPROC, _LEAST_PROCESSES, "ulimit -u 65536")
    if torch.cuda.is_available():
        yield _limit("locked memory", resource.RLIMIT_MEMLOCK, 1 << 30, "ulimit -l unlimited (InfiniBand)")
    yield _clock()


def _memory() -> Finding:
    free = memory_available()
    if free is None:
        return Finding(GROUP, "memory", "ok", "not known: the system does not say")
    todo = "Close other programs, or raise the container's limit" if free < _LEAST_MEMORY else ""
    return Finding.unless(GROUP, "memory", f"{free / _GB:.1f} GB can be used", todo)


def _cores() -> Finding:
    usable, here = usable_cores(), os.cpu_count() or 1
    load, name = os.getloadavg()[0], processor_name()
    text = f"{usable} of {here} usable{f', {name}' if name else ''}; load {load:.1f}"
    todo = (
        "Other programs are at work: timings will vary; OMP_NUM_THREADS=1 can make ranks much faster"
        if load > max(1.0, usable / 2)
        else ""
    )
    return Finding.unless(GROUP, "cores", text, todo)


def _shared_memory() -> Finding:
    place = Path("/dev/shm")
    if not place.is_dir():
        return Finding(GROUP, "/dev/shm", "warning", "absent", "Mount it: NCCL and worker processes use it")
    size = shutil.disk_usage(place)
    text = f"{size.free / _GB:.2f} of {size.total / _GB:.2f} GB free"
    if size.free <= _LEAST_SHARED and torch.cuda.is_available():
        todo = "In a container: docker run --shm-size=8g (or --ipc=host). NCCL keeps its buffers there"
        return Finding(GROUP, "/dev/shm", "fault", text, todo)
    todo = "In a container: docker run --shm-size=8g" if size.free <= _LEAST_SHARED else ""
    return Finding.unless(GROUP, "/dev/shm", text, todo)


def _limit(name: str, which: int, least: float, how: str) -> Finding:
    soft, _ = resource.getrlimit(which)
    endless = soft == resource.RLIM_INFINITY
    todo = f"Raise it: {how}" if soft < least and not endless else ""
    return Finding.unless(GROUP, f"limit on {name}", "none" if endless else f"{soft:,}", todo)


def _clock() -> Finding:
    """Ask whether the clock is synchronised: logs of several machines are compared by their times."""
    answer = said_by("timedatectl", "show", "-p", "NTPSynchronized", "--value", seconds=10)
    if answer == "no":
        todo = "Start chrony or systemd-timesyncd where several machines train together"
        return Finding(GROUP, "clock", "warning", "not synchronised", todo)
    return Finding(GROUP, "clock", "ok", "synchronised" if answer == "yes" else "the system does not say")


def check_variables() -> Iterator[Finding]:
    """Yield the variables that are set and change a run, and those whose value does harm."""
    names = [name for name in (*_SHOWN, *sorted(os.environ)) if name in os.environ]
    names = [name for name in names if name in _SHOWN or name.startswith("NCCL_")]
    for name in dict.fromkeys(names):
        yield _judged(name, os.environ[name])
    yield _threads()


def _judged(name: str, value: str) -> Finding:
    harm = {
        ("CUDA_LAUNCH_BLOCKING", "1"): "Unset it: every kernel waits for the one before",
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "Unset it: every collective is compared between ranks first",
        ("NCCL_P2P_DISABLE", "1"): "Unset it, unless GPUs fail to reach each other: NVLink is not used",
        ("NCCL_SHM_DISABLE", "1"): "Unset it, unless shared memory is too small",
        ("TORCH_COMPILE_DISABLE", "1"): "Unset it: compile = true compiles nothing",
    }
    return Finding.unless(VARIABLES, name, value, harm.get((name, value), ""))


def _threads() -> Finding:
    threads, cores = os.environ.get("OMP_NUM_THREADS"), usable_cores()
    if threads is None:
        text = "not set: trilith gives each rank its share of cores"
        return Finding(VARIABLES, "OMP_NUM_THREADS", "ok", text)
    many = (whole_number(threads) or 0) > cores
    todo = f"Set at most {cores}: more threads than cores wait for each other" if many else ""
    return Finding.unless(VARIABLES, "OMP_NUM_THREADS", threads, todo)
