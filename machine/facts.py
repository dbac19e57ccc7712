"""Say what a machine is, processor, versions, GPUs, and hold what the doctor finds about it."""

import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, Self

import torch

from ..system.machine import processor_name, usable_cores

#: The packages whose versions matter.
PACKAGES = ("trilith", "torch", "transformers", "safetensors")


def host() -> dict[str, Any]:
    """Return the processor, the cores that this process may use, the system, and the versions."""
    return {
        "processor": processor_name() or platform.processor(),
        "cores": usable_cores(),
        "system": platform.platform(),
        **versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of each package."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def gpus() -> dict[str, Any]:
    """Return the names of the GPUs, the free bytes of the one that has least, and NCCL's version.

    A process that has asked keeps memory on a GPU, so it is best one of its own.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "names": [torch.cuda.get_device_name(number) for number in range(count)],
        "free": min((torch.cuda.mem_get_info(number)[0] for number in range(count)), default=0),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if count else "",
    }


def driver() -> str:
    """Return the version of NVIDIA's driver; empty where nvidia-smi does not say."""
    return smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def smi(*options: str) -> str:
    """Return what nvidia-smi prints; empty where it is absent or fails."""
    return said_by("nvidia-smi", *options, seconds=30)


def said_by(*command: str, seconds: float) -> str:
    """Return what a command prints; empty where it is absent, fails or takes longer."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""


#: ok: nothing to do. warning: works, but slowly or not everywhere. fault: something will fail.
Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """State the result of a check: what was checked, what was found, and the next step if it is not ok."""

    group: str
    check: str
    level: Level
    found: str
    todo: str = ""

    @classmethod
    def unless(cls, group: str, check: str, found: str, todo: str, level: Level = "warning") -> Self:
        """Return a finding that is ok unless there is something to do."""
        return cls(group, check, level if todo else "ok", found, todo)
