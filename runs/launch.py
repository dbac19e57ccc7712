"""Get from a command to a running process group: here for one rank, in a process for each of several."""

import os
import signal
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
from secrets import token_hex
from typing import IO, Any

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
    init_process_group,
    launched,
    own_device,
)
from ..system import check_local_ranks, counted, usable_cores, visible
from ..system.process_info import LAUNCHER
from .guard import blame
from .heartbeat import first_failure, make_folder, read_status
from .rendezvous import join, tell_spares
from .requests import PREEMPTED, handled_signals

_LOOK_EVERY = 0.2
#: Seconds that ranks have to end by themselves once one has failed.
_HANGING_AFTER = 4.0
#: Seconds that a process has to be gone once its rank says that it ends.
_ENDING_AFTER = 30.0
#: Seconds in which a rank that failed has to end by itself.
_TO_LEAVE = 5.0


def own_rank() -> int:
    """Return this process's rank among those that a launcher started; 0 if nobody started ranks."""
    process = launched()
    return process.rank if process else 0


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
    process = launched()
    layout.check_world(process.world if process else 1)
    if device == "cuda" and process and process.local_rank >= torch.cuda.device_count():
        expected = f"one of the {torch.cuda.device_count()} CUDA devices of this machine, from 0"
        todo = 'Start fewer ranks on this host, or say device = "cpu"'
        raise BadInput("environment", "LOCAL_RANK", expected=expected, found=process.local_rank, todo=todo)


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
    process, world, rank = launched(), layout.world, own_rank()
    rank_device = own_device(device)
    card = {"torch": torch.__version__, "trilith": version("trilith"), **(alike or {})}
    store = join(process, card, timeout) if process else dist.HashStore()
    init_process_group(rank_device, timeout, store=store, rank=rank, world_size=world)
    failed = threading.Event()
    if process:
        _leave_when(failed)
    try:
        yield ParallelState.start(layout, device=rank_device, timeout=timeout, files_timeout=files_timeout)
    except BaseException:
        failed.set()
        abandon_process_group(rank_device)
        raise
    if process and rank == 0:
        tell_spares(store)
    dist.destroy_process_group()


def launch(arguments: Sequence[str], world: int, status: Path, *, lock: int | None = None) -> int:
    """Run ``trilith <arguments>`` on ``world`` local ranks; return the exit code of the rank that failed
    first, or 0.

    The ranks' codes and messages are read from the folder ``status``, which no other launch uses: they tell a
    victim from its cause. SIGTERM and SIGINT are passed on to the ranks. If this process is killed, the ranks
    save and end. ``lock``: a descriptor that the ranks inherit.
    """
    check_local_ranks(world)
    make_folder(status)
    run = token_hex(8)  # the name of no other start
    # The ranks meet at a store of this process, which outlives each of them.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    signals = set[int]()

    def pass_on(number: int, frame: object) -> None:
        signals.add(number)
        _send(ranks, number)

    with tempfile.TemporaryFile("w+") as log:
        ranks = _start(arguments, world, run, store.port, stdin=lock, stderr=log)
        with handled_signals(pass_on):
            killed = "".join(f"; {reason}" for reason in _wait(ranks, status, run))
        codes = [rank.returncode for rank in ranks]
        ended = [rank_status.code for rank_status in read_status(status, run=run)]
        if not any(codes) or ended == [0] * world:  # whatever became of a process behind its end
            return 0
        failed = first_failure(status, run=run)
        if failed is not None:
            kind = "stopped" if failed.code == PREEMPTED else "error"
            sys.stderr.write(f"{kind}: rank {failed.rank}: {visible(failed.error)}{killed}\n")
            return int(failed.code or 1)
        if signal.SIGTERM in signals and -signal.SIGTERM in codes:
            sys.stderr.write(
                "stopped: asked to stop before the ranks had begun: the same command begins again\n"
            )
            return PREEMPTED
        dead = blame(status, world, but=-1, run=run, wait=0.0)
        if not (dead and ended):  # not one came far enough to say why
            log.seek(0)
            sys.stderr.write(visible(log.read()))
    if dead or min(codes) < 0:
        why = visible(dead) or f"rank {codes.index(min(codes))} was killed by signal {-min(codes)}"
        sys.stderr.write(f"error: {why}\n")
        return PeerFailed.exit_code
    return max(codes)


def _start(
    arguments: Sequence[str], world: int, run: str, port: int, *, stdin: int | None, stderr: IO[str]
) -> list[subprocess.Popen[bytes]]:
    """Start the ranks with torchrun's variables, in sessions of their own: Ctrl-C reaches this process."""
    shared = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **os.environ,
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)},
        **{"LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": run, LAUNCHER: str(os.getpid())},
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [sys.executable, "-m", "trilith.cli", *arguments]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            how: dict[str, Any] = {"stdin": stdin, "stderr": stderr, "start_new_session": True}
            ranks.append(subprocess.Popen(command, env=environment, **how))
    except BaseException:
        for started in ranks:
            started.kill()
        raise
    return ranks


def _wait(ranks: Sequence[subprocess.Popen[bytes]], status: Path, run: str) -> list[str]:
    """Wait until all processes have ended. Once a rank has failed, the others are asked to end; those whose
    status does not say soon that they do hang, and are killed. So is, later, a process that hangs behind the
    end of its rank, also where no rank has failed. Returns what others killed, which no rank can say itself.
    """
    ending_since: float | None = None
    killed: list[str] = []
    while running := [rank for rank in ranks if rank.poll() is None]:
        time.sleep(_LOOK_EVERY)
        statuses = read_status(status, run=run)
        ended = {rank_status.pid for rank_status in statuses if rank_status.code is not None}
        codes = [rank.returncode for rank in ranks] + [rank_status.code for rank_status in statuses]
        failed = any(code not in (None, 0, PREEMPTED) for code in codes)
        if ending_since is None and (failed or len(ended) == len(ranks)):
            ending_since = time.monotonic()
            ends = ((rank, process.poll() or 0) for rank, process in enumerate(ranks))
            killed = [f"rank {rank} was killed by signal {-code}" for rank, code in ends if code < 0]
            _send(running if failed else [], signal.SIGTERM)
        late = 0.0 if ending_since is None else time.monotonic() - ending_since
        if late > _HANGING_AFTER:
            ending = set[int]() if late > _ENDING_AFTER else ended
            _send([rank for rank in running if rank.pid not in ending], signal.SIGKILL)
    return killed


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        rank.send_signal(number)  # which does nothing to a process that has ended


def _leave_when(failed: threading.Event) -> None:
    """End this process after a failure, even if a peer hangs or a destructor waits for a collective.

    The thread is made beforehand: without memory, starting one may hang.
    """

    def leave() -> None:
        failed.wait()
        time.sleep(_TO_LEAVE)
        os._exit(PeerFailed.exit_code)

    threading.Thread(target=leave, name="leave", daemon=True).start()
