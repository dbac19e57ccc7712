"""Run a command line in a forked child, under a limit or with fewer rights, and see all that it leaves."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trilith.system.process_info import children_of

_PIPE_SIZE = 1 << 20
#: Seconds in which what an ended process started must end too, on a busy machine.
_LEAVE_WITHIN = 20.0
_LIBC = ctypes.CDLL(None, use_errno=True)
#: Numbers of the kernel's headers, and the user without any rights of his own.
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_PR_SET_KEEPCAPS, _CLONE_NEWNS, _NOBODY = 8, 0x20000, 65534
_PR_SET_CHILD_SUBREAPER = 36
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18


@dataclass(frozen=True, slots=True)
class Ended:
    """Report how a child process ended.

    ``code``: its exit code (``None`` if it had to be killed). ``err``: its text on stderr.
    ``left_processes``: whether a process that it started outlived it.
    """

    code: int | None
    err: str
    left_processes: bool


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """While it lasts, descendants whose parent dies become children of this process, not of the first one."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def run_forked(work: Callable[[], int], folder: Path, *, limit: float) -> Ended:
    """Run ``work`` in a child whose working directory is ``folder``; kill it after ``limit`` seconds.

    A fork, because an import of torch costs seconds and a limit on file descriptors cannot be taken back.
    """
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    with _adopting_orphans():
        before = _children()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            sys.dont_write_bytecode = True  # under a limit of sizes half a file would be left for everybody
            _become(work, folder, writing)
        os.close(writing)
        status = _wait(pid, limit)
        left = _end_group(pid) | _end_left(before)
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


def little_memory(spare: int) -> None:
    """Leave this process ``spare`` bytes more of memory for data than it has."""
    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (held + spare, held + spare))


def no_more_processes() -> None:
    """Let this process start neither threads nor processes.

    The limit does not count for root: the process becomes nobody's, which still may open root's files.
    """
    _call(_LIBC.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl")
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _change_capabilities(lambda had: had & (1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH))
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))


def may_mount() -> bool:
    """Return whether a child of this process may have mounts of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            own_mounts()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def own_mounts() -> None:
    """Let no other process see what this one mounts; all of it is gone when this process ends."""
    _call(_LIBC.unshare(_CLONE_NEWNS), "unshare")
    _mount("none", Path("/"), "", _MS_REC | _MS_PRIVATE)


def mount_full(place: Path) -> None:
    """Mount a disk on the folder ``place`` that has room for files' names and for nothing in them."""
    _mount("tmpfs", place, "tmpfs", 0, f"size={resource.getpagesize()}")
    (place / "full").write_bytes(b"x" * resource.getpagesize())


def mount_read_only(place: Path) -> None:
    """Mount the folder ``place`` on itself, for reading only."""
    _mount(str(place), place, "", _MS_BIND)
    _mount("none", place, "", _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def obey_permissions() -> None:
    """Let the permissions of files count for this process even if it is root's."""
    _change_capabilities(lambda had: had & ~(1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH))


def _change_capabilities(change: Callable[[int], int]) -> None:
    """Give the effective and permitted capabilities of this process, a bit each, another value."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    _call(_LIBC.capget(header, data), "capget")
    permitted = change(data[1])
    data[0], data[1], data[3], data[4] = permitted, permitted, 0, 0
    _call(_LIBC.capset(header, data), "capset")


def _mount(what: str, place: Path, kind: str, flags: int, options: str = "") -> None:
    words = (what.encode(), os.fsencode(place), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _call(_LIBC.mount(*words), "mount")


def _call(failed: int, name: str) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), name)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _become(work: Callable[[], int], folder: Path, err: int) -> None:
    code = 99
    gc.freeze()  # or the first collection here would copy every page that the parent has objects on
    try:
        os.setsid()
        os.chdir(folder)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for source, fd in ((nowhere, 0), (nowhere, 1), (err, 2)):
            os.dup2(source, fd)
        os.closerange(3, 4096)
        sys.stdin = os.fdopen(0, closefd=False)
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
    """Return the child's wait status, ``None`` if it did not end in time."""
    began, ended = time.monotonic(), None
    while ended is None and time.monotonic() - began < limit:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        time.sleep(0.005)
    if ended is None:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return None if ended is None else status


def waited_for_a_core(pid: int | str = "self") -> float:
    """Return seconds that the main thread waited for a core; 0 if the kernel does not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError):
        return 0.0


def _children() -> set[int]:
    return {child.pid for child in children_of(os.getpid())}


def _end_left(before: set[int]) -> bool:
    """End what an ended child left, also in sessions of their own; return whether they did not end soon.

    A rank, or a template of ranks that still imports torch, sees only then that its harness is gone.
    """
    until = time.monotonic() + _LEAVE_WITHIN
    late = False
    while left := _children() - before:
        late = time.monotonic() > until
        for pid in left:
            if late:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0 if late else os.WNOHANG)
        time.sleep(0.02)
    return late


def _end_group(pid: int) -> bool:
    """End the child's remaining processes; return whether there were any."""
    for _ in range(1000):  # its own children may need a moment after it, and a core of a busy machine
        with suppress(ChildProcessError):
            while os.waitpid(-pid, os.WNOHANG)[0]:  # such as a compiler of an interrupted command
                pass
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    return True
