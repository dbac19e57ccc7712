"""Read what Linux knows about a process, and how the processes of one start belong together.

A process id alone does not name a process for long, because the system uses it again. Together with the time
at which the process started it does.
"""

import ctypes
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")  # nothing else in the house reads it
#: Linux's number for ``prctl``.
_SET_PARENT_DEATH_SIGNAL = 1


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Describe a process: ``state`` is Linux's letter (Z: dead, but not waited for yet; T: stopped),
    ``started`` the time of its start, in ticks since the machine's.
    """

    pid: int
    state: str
    parent: int
    started: int

    @property
    def alive(self) -> bool:
        return self.state not in ("Z", "X")


def process_info(pid: int) -> ProcessInfo | None:
    """Look a process up; ``None`` where there is none, or where the system does not say."""
    try:
        # The name, in parentheses, may hold anything.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return ProcessInfo(pid, fields[0], int(fields[1]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def has_process_info() -> bool:
    """Tell whether this system says anything about processes in ``/proc``."""
    return process_info(os.getpid()) is not None


def start_of(pid: int) -> int:
    """Return when the process started, in ticks since the machine's start; 0 if that is not known."""
    info = process_info(pid)
    return info.started if info else 0


def children_of(pid: int) -> list[ProcessInfo]:
    """Return the processes whose parent this is, also dead ones that nobody has waited for."""
    numbers = [int(path.name) for path in _PROC.glob("[0-9]*")] if has_process_info() else []
    processes = (process_info(number) for number in numbers)
    return [process for process in processes if process is not None and process.parent == pid]


def environment_of(pid: int) -> list[str]:
    """Return the environment, as ``NAME=value``, that the process was started with; empty if not known."""
    try:
        return (_PROC / str(pid) / "environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def started_with(*variables: str) -> list[int]:
    """Return the ids of the processes that were started with all of these ``NAME=value``."""
    numbers = [int(path.name) for path in _PROC.glob("[0-9]*")]
    return [number for number in numbers if set(variables) <= set(environment_of(number))]


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """Hold the memory of this process in bytes.

    ``virtual``: all its address space. ``resident``: what lies in RAM now. ``data``: what ``RLIMIT_DATA``
    counts.
    """

    virtual: int
    resident: int
    data: int


def own_memory() -> OwnMemory | None:
    """Ask the system how much memory this process holds; ``None`` where it does not say."""
    try:
        pages = [int(number) for number in (_PROC / "self" / "statm").read_text().split()]
        virtual, resident, _, _, _, data, _ = (count * resource.getpagesize() for count in pages)
    except (OSError, ValueError):
        return None
    return OwnMemory(virtual, resident, data)


#: The variable by which a launcher tells its ranks its process id.
LAUNCHER = "_TRILITH_LAUNCHER"


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Have the system send this process the signal when its parent dies; now, if that was its launcher, which
    is gone already.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(number), 0, 0, 0)
    if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), number)
