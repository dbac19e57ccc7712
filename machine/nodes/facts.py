"""Gather what one node says of itself: its name, versions, GPUs, and the speed of the folders of a run."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..doctor.disk import measure_folder
from ..facts import driver, gpus, versions


def node_name() -> str:
    """Return this node's name: the one that Slurm knows it by, or else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def facts_of_node() -> dict[str, str]:
    """Return the facts in which all nodes should be alike, by name."""
    found = {name: version or "not installed" for name, version in versions().items()}
    here = gpus()
    names = here["names"]
    found["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    return found | ({"NCCL": here["nccl"], "driver": driver()} if names else {})


def node_card(folders: Sequence[Path]) -> dict[str, Any]:
    """Return what this node says of itself, in a form that JSON can hold."""
    return {
        "name": node_name(),
        "facts": facts_of_node(),
        "folders": {str(folder): asdict(measure_folder(folder)) for folder in folders},
    }
