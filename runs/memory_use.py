"""Measure the memory of this rank: the device's peak, or that of the process on a CPU."""

import resource
import sys

import torch

from ..parallel_state.engine import accelerator
from ..system.process_info import own_memory


def memory_used(device: torch.device) -> int:
    """Return bytes: the most that tensors have used on the GPU so far, or the CPU process's memory now.

    Without ``/proc``, the most that the process has used.
    """
    if (peak := accelerator.peak_memory(device)) is not None:
        return peak
    if (memory := own_memory()) is not None:
        return memory.resident
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
