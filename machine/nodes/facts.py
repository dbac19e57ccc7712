"""Gather what one node says of itself: its name, versions, GPUs, and the speed of the folders of a run."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from ..check_devices import smi

#: Bytes that are written into a folder to measure its disk.
_WRITTEN = 64 << 20
_PIECE = 1 << 20
_PACKAGES = ("trilith", "torch", "transformers", "safetensors")


@dataclass(frozen=True, slots=True)
class Folder:
    """Hold the free bytes of a folder's disk and its speed in bytes a second, or why it cannot be used."""

    free: int = 0
    written: float = 0.0
    read: float = 0.0
    error: str = ""


def node_name() -> str:
    """Return this node's name: the one that Slurm knows it by, or else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def facts_of_node() -> dict[str, str]:
    """Return the facts in which all nodes should be alike, by name."""
    found = {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    found["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    if names:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    return found


def node_card(folders: Sequence[Path]) -> dict[str, Any]:
    """Return what this node says of itself, in a form that JSON can hold."""
    return {
        "name": node_name(),
        "facts": facts_of_node(),
        "folders": {str(folder): asdict(measure_folder(folder)) for folder in folders},
    }


def measure_folder(folder: Path) -> Folder:
    """Write a file into the folder, read it back and delete it; the file is on the disk before the clock
    stops.
    """
    piece = os.urandom(_PIECE)
    try:
        free = shutil.disk_usage(folder).free
        with NamedTemporaryFile(dir=folder, prefix=".trilith-doctor-", buffering=0) as file:
            began = time.perf_counter()
            for _ in range(_WRITTEN // _PIECE):
                file.write(piece)
            os.fsync(file.fileno())
            written = time.perf_counter() - began
            if hasattr(os, "posix_fadvise"):  # read from the disk and not from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began = time.perf_counter()
            while file.read(_PIECE):
                pass
            read = time.perf_counter() - began
    except OSError as error:
        return Folder(error=error.strerror or str(error))
    return Folder(free, _WRITTEN / written, _WRITTEN / read)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
