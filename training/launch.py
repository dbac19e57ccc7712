"""From a command to a running process group: bare on one rank, through torchrun on many."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from ..parallel_state import BACKENDS, FILES_TIMEOUT, TIMEOUT, BadInput, Layout, ParallelState, PeerFailed
from .join import join
from .preempt import PREEMPTED
from .status import blame, clear_status, first_failure, make_folder, read_status

_LOOK_EVERY = 0.2
#: Seconds that ranks have to end by themselves once one has failed.
_HANGING_AFTER = 4.0
#: Seconds in which a rank that failed has to end by itself.
_TO_LEAVE = 5.0


def under_torchrun() -> bool:
    """Whether somebody has already started the ranks. Raises ``BadInput`` for half a set of its variables."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if name in os.environ]
    if given and len(given) < len(names):
        missing = ", ".join(sorted(set(names) - set(given)))
        raise BadInput(
            "environment",
            missing,
            expected=f"all of {', '.join(names)}",
            found=f"only {', '.join(given)}",
            todo="Start through torchrun, or unset them",
        )
    return bool(given)


def own_rank() -> int:
    """This process's rank under torchrun; 0 where nobody started ranks."""
    return int(os.environ.get("RANK", "0"))


def check_device(device: str) -> None:
    """``BadInput`` for CUDA where there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("recipe", "device", expected="cpu: this machine has no CUDA device", found="cuda")


def check_launch(layout: Layout, *, device: str) -> None:
    """Refuse a device that is not here, or another number of ranks than the layout's. Leaves no trace."""
    check_device(device)
    layout.check_world(int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1)


@contextmanager
def process_group(
    layout: Layout,
    *,
    device: str = "cpu",
    timeout: timedelta = TIMEOUT,
    files_timeout: timedelta = FILES_TIMEOUT,
    alike: Mapping[str, str] | None = None,
) -> Iterator[ParallelState]:
    """Join (or, on one rank, make) the process group and take it down at the end; gives this rank's state.

    ``timeout`` bounds every wait for a peer, ``files_timeout`` those for files; ``alike`` are facts in which
    all ranks must agree, and they must agree in the versions of torch and of this library.
    """
    check_launch(layout, device=device)
    many = under_torchrun()
    world = layout.world
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    rank = own_rank()
    card = {"torch": torch.__version__, "trilith": version("trilith"), **(alike or {})}
    store = join(rank, world, card, timeout) if many else dist.HashStore()
    dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=world, timeout=timeout)
    failed = threading.Event()
    if many:
        _leave_when(failed)
    try:
        yield ParallelState.start(layout, device=device, timeout=timeout, files_timeout=files_timeout)
    except BaseException:
        failed.set()
        raise
    dist.destroy_process_group()


def launch(arguments: Sequence[str], world: int, status: Path) -> int:
    """Run ``trilith <arguments>`` on ``world`` local ranks through torchrun; the exit code of the first that
    failed.

    torchrun flattens every exit code to 1, so the ranks' own words are read from the folder ``status``.
    SIGTERM and SIGINT go on to torchrun, which hands them to the ranks.
    """
    make_folder(status)
    clear_status(status)
    each = max(1, (os.cpu_count() or 1) // world)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", str(os.getpid())]
    command += ["--no-python", sys.executable, "-m", "trilith.cli", *arguments]
    environment = {"OMP_NUM_THREADS": str(each), **os.environ}
    with tempfile.TemporaryFile("w+") as log:
        # What torchrun says on a failure is a page that blames the victim; it is kept for the unexpected
        # case.
        child = subprocess.Popen(command, env=environment, stderr=log)
        with forward_signals(child):
            code = _wait(child, status)
        failed = first_failure(status) if code else None
        if failed is not None:
            kind = "stopped" if failed.code == PREEMPTED else "error"
            sys.stderr.write(f"{kind}: rank {failed.rank}: {failed.error}\n")
            return int(failed.code or 1)
        dead = blame(status, world, but=-1, wait=0.0) if code else ""
        if dead:
            if not read_status(status):  # not one came far enough to say why
                log.seek(0)
                sys.stderr.write(log.read())
            sys.stderr.write(f"error: {dead}\n")
            return PeerFailed.exit_code
        if code:
            log.seek(0)
            sys.stderr.write(log.read())
    return code if code >= 0 else 1


def _wait(child: subprocess.Popen[bytes], status: Path) -> int:
    """The exit code of torchrun, which gives ranks that hang after a failure half a minute: we give less."""
    failed_at: float | None = None
    while child.poll() is None:
        time.sleep(_LOOK_EVERY)
        known = read_status(status)
        if failed_at is None and any(one.code not in (None, 0, PREEMPTED) for one in known):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _HANGING_AFTER:
            for one in known:
                if one.code is None and one.host == socket.gethostname() and _parent_of(one.pid) == child.pid:
                    os.kill(one.pid, signal.SIGKILL)
    return child.returncode


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


@contextmanager
def forward_signals(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """While it lasts, SIGTERM and SIGINT are the child's business."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        if child.poll() is None:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_when(failed: threading.Event) -> None:
    """After a failure nothing may keep this process: no peer that hangs, no collective in a destructor.

    The thread is made beforehand: where memory ran out, starting one may hang.
    """

    def leave() -> None:
        failed.wait()
        time.sleep(_TO_LEAVE)
        os._exit(PeerFailed.exit_code)

    threading.Thread(target=leave, name="leave", daemon=True).start()
