"""Read what Linux knows about this machine: memory that is free, cores, file systems, the processor's name.

A container may have less than the machine: its limits count.
"""

import os
from pathlib import Path

from .text import whole_number

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def memory_available(*, swap: bool = False) -> int | None:
    """Return the bytes that new processes can use, free ``swap`` too if asked; ``None``: not known."""
    available = _meminfo("MemAvailable:")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None:
        files = [line for line in _lines(_CGROUP / "memory.stat") if line.startswith("file ")]
        available.append(limit - (used or 0) + sum(_first_number(line) or 0 for line in files))
    least = min(available, default=None)
    return least + sum(_meminfo("SwapFree:")) if least is not None and swap else least


def _meminfo(name: str) -> list[int]:
    """Return the bytes of the lines of this name, each a number of kilobytes."""
    lines = [line for line in _lines(_PROC / "meminfo") if line.startswith(name)]
    return [1024 * kilobytes for line in lines if (kilobytes := _first_number(line)) is not None]


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    cores = len(os.sched_getaffinity(0))
    words = " ".join(_lines(_CGROUP / "cpu.max")).split()
    if len(words) == 2 and (quota := whole_number(words[0])) and (period := whole_number(words[1])):
        cores = min(cores, round(quota / period))
    return max(1, cores)


def processor_name() -> str:
    """Return the processor's name; empty where the system does not say."""
    names = [line.partition(":")[2] for line in _lines(_PROC / "cpuinfo") if line.startswith("model name")]
    return names[0].strip() if names else ""


def file_system_of(path: Path) -> str:
    """Return the kind of an existing path's file system (ext4, nfs4, tmpfs); empty where not known."""
    real, kind, mounted_at = os.path.realpath(path), "", ""
    for line in _lines(_PROC / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        if len(fields := before.split()) < 5 or not after.split():
            continue
        place = fields[4].replace("\\040", " ")
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        # Of two mounts at one place, the later one hides the earlier one.
        if inside and len(place) >= len(mounted_at):
            kind, mounted_at = after.split()[0], place
    return kind


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Return the only number of a file; ``None`` without the file, and for the word max."""
    return whole_number("".join(_lines(path)).strip())


def _first_number(line: str) -> int | None:
    return whole_number("".join(line.split()[1:2]))
