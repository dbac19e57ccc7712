"""How much memory this rank uses: the device's peak, or the process's own on a CPU."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch


def memory_used(device: torch.device) -> int:
    """Bytes: the most that tensors have taken on the GPU so far, or on a CPU what the process holds now.

    Where there is no ``/proc``, the most that the process has held.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return resident * os.sysconf("SC_PAGE_SIZE")
