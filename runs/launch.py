"""Get from a command to a running process group: directly for one rank, through torchrun for many."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from ..parallel_state import (
    BACKENDS,
    FILES_TIMEOUT,
    TIMEOUT,
    BadInput,
    Layout,
    ParallelState,
    PeerFailed,
    abandon_process_group,
    check_local_ranks,
    init_process_group,
    launched,
    own_device,
)
from ..system import counted, visible
from ..system.machine import usable_cores
from ..system.process_info import adopting_orphans, children_of, environment_of, process_info
from .guard import blame
from .heartbeat import RankStatus, first_failure, make_folder, new_start, read_status
from .rendezvous import join, tell_spares
from .requests import GRACE, PREEMPTED

_LOOK_EVERY = 0.2
#: Seconds that ranks have to end by themselves once one has failed.
_HANGING_AFTER = 4.0
#: Seconds that ranks have to save and leave once torchrun is gone.
_ORPHANS_AFTER = GRACE + 5.0


class OwnRanks:
    """Follow the ranks under ``child``, which is torchrun, by their status in the folder ``status``.

    Their status has the name ``run``. A process counts as ours if ``run`` is in its environment and its
    parent is torchrun or, once torchrun is dead, this process; a status file alone proves nothing.
    """

    def __init__(self, child: subprocess.Popen[bytes], status: Path, run: str) -> None:
        self._child, self._status, self._run = child, status, run

    def wait(self) -> int:
        """Return the exit code of torchrun, once it and all ranks are gone.

        torchrun gives ranks that hang after a failure half a minute; we give less.
        """
        failed_at: float | None = None
        while self._child.poll() is None:
            time.sleep(_LOOK_EVERY)
            statuses = read_status(self._status, run=self._run)
            if failed_at is None and any(status.code not in (None, 0, PREEMPTED) for status in statuses):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > _HANGING_AFTER:
                for status in statuses:
                    if status.code is None and self._runs_under_torchrun(status):
                        os.kill(status.pid, signal.SIGKILL)
        self._end_orphans()
        return self._child.returncode

    def _runs_under_torchrun(self, status: RankStatus) -> bool:
        info = None if status.gone else process_info(status.pid)
        return info is not None and info.parent == self._child.pid and info.started == status.started

    def _end_orphans(self) -> None:
        """Ask ranks whose torchrun was killed to save and leave; after a while, kill them."""
        deadline, asked = time.monotonic() + _ORPHANS_AFTER, set[int]()
        while orphans := self._orphans():
            late = time.monotonic() > deadline
            for pid in orphans if late else orphans - asked:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            asked |= orphans
            time.sleep(_LOOK_EVERY)
        for pid in asked:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _orphans(self) -> set[int]:
        """Return the ranks of this start that are now our children, because their torchrun died."""
        name = f"TORCHELASTIC_RUN_ID={self._run}"
        pids = [child.pid for child in children_of(os.getpid()) if child.alive]
        return {pid for pid in pids if name in environment_of(pid)}


#: Seconds in which a rank that failed has to end by itself.
_TO_LEAVE = 5.0


def ranks_are_started() -> bool:
    """Tell whether a launcher started this process as a rank; raise ``BadInput`` for impossible variables."""
    return launched() is not None


def own_rank() -> int:
    """Return this process's rank among those that a launcher started; 0 if nobody started ranks."""
    here = launched()
    return here.rank if here else 0


def check_device(device: str) -> None:
    """Raise ``BadInput`` for a device that is not known, and for CUDA if there is none."""
    if device not in BACKENDS:
        expected, todo = f"auto, {' or '.join(BACKENDS)}", "cuda is a GPU of NVIDIA or AMD"
        raise BadInput("device", expected=expected, found=repr(device)[:80], todo=todo)
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("device", "cuda", expected="a GPU that torch sees", found=no_gpu(), todo=NO_GPU)


#: What to do about a GPU that torch does not see.
NO_GPU = "Compute with cpu or auto; `trilith doctor` says more"


def no_gpu() -> str:
    """Say why torch sees no GPU, as far as its build tells."""
    built = torch.version.cuda or torch.version.hip
    return f"none: this torch, {torch.__version__}, is a build for CPUs" if built is None else "none"


def device_here(device: str, *, gpu: bool = False) -> str:
    """Return the device that ``auto`` is on this machine; another one is returned as it is. ``gpu``: as if
    there were GPUs here.

    A GPU is taken also where there are too few for the ranks: ``check_local`` and ``check_launch`` refuse
    that, because a run that goes on a CPU unasked looks as if it hung.
    """
    if device != "auto":
        return device
    return "cuda" if gpu or torch.cuda.is_available() else "cpu"


def device_words(device: str) -> str:
    """Return the words for a device in a run's first line: a GPU with its name, if it is not simulated, and
    what to do on a CPU that other programs use too, where threads that wait for each other take most time.
    """
    load, cores = os.getloadavg()[0], usable_cores()
    if device == "cpu" and load > cores and torch.get_num_threads() > 1:
        busy = f"load {load:.1f} on {counted(cores, 'core')}"
        return f"cpu ({busy}: OMP_NUM_THREADS=1 may be many times faster)"
    named = device == "cuda" and torch.cuda.is_available()
    return f"{device}, {torch.cuda.get_device_name()}" if named else device


def check_local(layout: Layout, *, device: str) -> None:
    """Refuse a device that is not here, or more ranks than this machine can run. Leaves no trace.

    Only for ranks that nobody has started yet: those of a launcher may be spread over many machines.
    """
    check_device(device)
    check_local_ranks(layout.world, devices=torch.cuda.device_count() if device == "cuda" else None)


def check_launch(layout: Layout, *, device: str) -> None:
    """Refuse a device that is not here, or another number of ranks than the layout's. Leaves no trace."""
    check_device(device)
    here = launched()
    layout.check_world(here.world if here else 1)
    if device == "cuda" and here and here.local_rank >= torch.cuda.device_count():
        expected = f"one of the {torch.cuda.device_count()} CUDA devices of this machine, from 0"
        todo = 'Start fewer ranks on this host, or say device = "cpu"'
        raise BadInput("environment", "LOCAL_RANK", expected=expected, found=here.local_rank, todo=todo)


@contextmanager
def process_group(
    layout: Layout,
    *,
    device: str = "cpu",
    timeout: timedelta = TIMEOUT,
    files_timeout: timedelta = FILES_TIMEOUT,
    alike: Mapping[str, str] | None = None,
) -> Iterator[ParallelState]:
    """Join (or, on one rank, make) the process group and take it down at the end; yield this rank's state.

    ``timeout`` bounds every wait for a peer, ``files_timeout`` every wait for files. ``alike``: facts that
    must be the same on all ranks, in addition to the versions of torch and trilith.
    """
    check_launch(layout, device=device)
    if dist.is_initialized():
        raise BadInput(
            "run", "process group", expected="none yet: a run makes its own",
            found=f"one of {counted(dist.get_world_size(), 'rank')}",
            todo="Call run before Accelerator(), or torch.distributed.destroy_process_group() before it",
        )  # fmt: skip
    here, world, rank = launched(), layout.world, own_rank()
    mine = own_device(device)
    card = {"torch": torch.__version__, "trilith": version("trilith"), **(alike or {})}
    store = join(here, card, timeout) if here else dist.HashStore()
    init_process_group(mine, timeout, store=store, rank=rank, world_size=world)
    failed = threading.Event()
    if here:
        _leave_when(failed)
    try:
        yield ParallelState.start(layout, device=mine, timeout=timeout, files_timeout=files_timeout)
    except BaseException:
        failed.set()
        abandon_process_group(mine)
        raise
    if here and rank == 0:
        tell_spares(store)
    dist.destroy_process_group()


def launch(arguments: Sequence[str], world: int, status: Path, *, lock: int | None = None) -> int:
    """Run ``trilith <arguments>`` on ``world`` local ranks through torchrun; return the exit code of the rank
    that failed first, or 0.

    torchrun replaces every exit code by 1, so the ranks' own codes and messages are read from the folder
    ``status``, which no other launch uses. SIGTERM and SIGINT are passed on to torchrun, which passes them to
    the ranks. If this process or torchrun is killed, the ranks save and end. ``lock``: a descriptor that the
    ranks inherit.
    """
    check_local_ranks(world)
    make_folder(status)
    run = new_start()
    each = max(1, (os.cpu_count() or 1) // world)
    command = [sys.executable, "-m", "trilith.runs.torchrun_agent", str(os.getpid())]
    command += ["--nproc-per-node", str(world)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", run]
    command += ["--no-python", sys.executable, "-m", "trilith.cli", *arguments]
    environment = {"OMP_NUM_THREADS": str(each), **os.environ}
    with tempfile.TemporaryFile("w+") as log, adopting_orphans():
        # On a failure torchrun prints a page that blames the victim; it is kept for the unexpected case.
        child = subprocess.Popen(command, env=environment, stdin=lock, stderr=log)
        with forward_signals(child):
            ranks = OwnRanks(child, status, run)
            code = ranks.wait()
        ended = [rank_status.code for rank_status in read_status(status, run=run)]
        if code == 0 or ended == [0] * world:  # whatever became of torchrun
            return 0
        failed = first_failure(status, run=run)
        if failed is not None:
            kind = "stopped" if failed.code == PREEMPTED else "error"
            sys.stderr.write(f"{kind}: rank {failed.rank}: {visible(failed.error)}\n")
            return int(failed.code or 1)
        dead = blame(status, world, but=-1, run=run, wait=0.0)
        if not (dead and ended):  # not one came far enough to say why
            log.seek(0)
            sys.stderr.write(visible(log.read()))
    if dead or code < 0:
        why = visible(dead) or f"torchrun was killed by signal {-code}"
        sys.stderr.write(f"error: {why}\n")
        return PeerFailed.exit_code
    return code


@contextmanager
def forward_signals(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass SIGTERM and SIGINT on to the child during the block."""

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
    """End this process after a failure, even if a peer hangs or a destructor waits for a collective.

    The thread is made beforehand: without memory, starting one may hang.
    """

    def leave() -> None:
        failed.wait()
        time.sleep(_TO_LEAVE)
        os._exit(PeerFailed.exit_code)

    threading.Thread(target=leave, name="leave", daemon=True).start()
