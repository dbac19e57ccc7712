"""Limit the time and memory of code that somebody else wrote, and refuse to begin with too little.

A pattern or a template of somebody else's runs in ``bounded``. The interpreter itself sees to it that a
signal ends an endless loop, in Python and inside ``re``, and the operating system refuses memory beyond a
limit. Both belong to the process: signals reach its main thread alone, so in another thread only memory is
limited. torch ends the process where the system refuses it a file or memory, so ``check_enough`` asks first.
"""

import math
import mmap
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from .errors import require
from .process_info import own_memory

#: For each core, and on a machine with few cores. Tests of layouts run many more ranks than there are cores.
_FOR_EACH_CORE, _ON_A_SMALL_MACHINE = 4, 64


class OverLimit(Exception):
    """Report that a block needed more than its limit; the message names the limit."""


@contextmanager
def bounded(*, seconds: float | None = None, memory: int | None = None) -> Iterator[None]:
    """Raise ``OverLimit`` if the block needs more processor time, or more memory (bytes) than the process
    holds now, which includes what was freed and lies in its heap.

    Processor time is counted, so a slow or sleeping machine does not matter. A block inside another one does
    not extend the limit of the outer one.
    """
    timed = seconds is not None and threading.current_thread() is threading.main_thread()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    handler: Any = None
    around, began = (0.0, 0.0), 0.0

    def late(number: int, frame: FrameType | None) -> None:
        if around[0] and around[0] < (seconds or 0) and callable(handler):
            handler(number, frame)  # the block around this one has used its time
        raise OverLimit(f"{seconds:g} s of processor time")

    own = own_memory() if memory is not None else None
    try:
        if memory is not None and own is not None:
            limits = [own.data + memory, *(limit for limit in before if limit != resource.RLIM_INFINITY)]
            resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
        if timed:
            handler = signal.signal(signal.SIGVTALRM, late)
            # Again and again: what runs may catch the first exception and try another way.
            around, began = signal.getitimer(signal.ITIMER_VIRTUAL), os.times().user
            first = min(seconds or 0, around[0] or math.inf)
            signal.setitimer(signal.ITIMER_VIRTUAL, first, 0.25)
        yield
    except MemoryError:
        if memory is None:
            raise
        raise OverLimit(f"{memory >> 20} MiB of memory") from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, handler or signal.SIG_DFL)
            if around[0]:  # that of a block around this one, which this one's time counts for
                seconds_left = around[0] - (os.times().user - began)
                signal.setitimer(signal.ITIMER_VIRTUAL, max(seconds_left, 1e-3), around[1])
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def most_at_once() -> int:
    """Return the largest number of processes, or of threads that work, that a command starts here.

    A larger number is a typing error: that many would exhaust the machine.
    """
    return max(_ON_A_SMALL_MACHINE, _FOR_EACH_CORE * (os.cpu_count() or 1))


#: File descriptors that a command has open at once: of its threads, its ranks' pipes, and libraries.
DESCRIPTORS = 64
#: Bytes without which not even the libraries can be loaded.
MEMORY = 2**28


def check_enough() -> None:
    """Raise the system's ``OSError`` where ``DESCRIPTORS`` files or ``MEMORY`` bytes more cannot be had."""
    descriptors: list[int] = []
    try:
        for _ in range(DESCRIPTORS):
            descriptors.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    mmap.mmap(-1, MEMORY, flags=mmap.MAP_PRIVATE).close()  # untouched, it costs nothing


def check_local_ranks(ranks: int, *, devices: int | None = None) -> None:
    """Raise ``BadInput`` for more ranks than this machine should start.

    The limit is one rank for each device of ``devices`` if ranks compute on GPUs, otherwise
    ``most_at_once()`` processes.
    """
    most = most_at_once() if devices is None else devices
    what = "processes" if devices is None else "CUDA devices, one for each rank"
    cpu = "" if devices is None else ', or say device = "cpu"'
    todo = f"Start them on several hosts with torchrun, or ask for a smaller layout{cpu}"
    require(ranks <= most, "ranks of this machine", None, f"at most {most:,} {what}", f"{ranks:,}", todo)


def check_workers(workers: int, where: str) -> None:
    """Raise ``BadInput``, naming ``where``, for no worker, or more than this machine should start."""
    most = most_at_once()
    require(1 <= workers <= most, where, "workers", f"from 1 to {most:,} on this machine", f"{workers:,}")
