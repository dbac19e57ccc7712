"""Run a command line in a forked child, under a limit or with fewer rights, and see all that it leaves."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PIPE_SIZE = 1 << 20
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: its exit code (``None`` if it had to be killed), its words on stderr, and whether a
    process of its own outlived it.
    """

    code: int | None
    err: str
    left_processes: bool


def run_forked(work: Callable[[], int], folder: Path, *, limit: float) -> Ended:
    """Run ``work`` in a child whose working directory is ``folder``; kill it after ``limit`` seconds.

    A fork, because an import of torch costs seconds and a limit on file descriptors cannot be taken back.
    """
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _become(work, folder, writing)
    os.close(writing)
    status = _wait(pid, limit)
    left = _end_group(pid)
    err = b""
    os.set_blocking(reading, False)
    try:
        while part := os.read(reading, _PIPE_SIZE):
            err += part
    except BlockingIOError:
        pass
    os.close(reading)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    return Ended(code, err.decode(errors="replace"), left)


def few_descriptors(spare: int) -> None:
    """Leave this process ``spare`` more file descriptors than it has open."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd") if int(name) < 3 or _is_open(int(name)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + spare, highest + 1 + spare))


def small_files_only(size: int) -> None:
    """Let no file grow beyond ``size`` bytes, as a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def obey_permissions() -> None:
    """Let the permissions of files count for this process even if it is root's."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for word in (0, 1):  # effective, permitted
        data[word] &= ~(1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH)
    if libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _become(work: Callable[[], int], folder: Path, err: int) -> None:
    code = 99
    try:
        os.setsid()
        os.chdir(folder)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for source, fd in ((nowhere, 0), (nowhere, 1), (err, 2)):
            os.dup2(source, fd)
        os.closerange(3, 4096)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _wait(pid: int, limit: float) -> int | None:
    """The child's wait status; ``None`` if it did not end in time."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _end_group(pid: int) -> bool:
    """End what is left of the child's processes; whether there was any."""
    for _ in range(200):  # its own children may need a moment after it
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    return True
