"""Guard a rank: write its heartbeat and, if it fails, who was at fault first and its last message."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import torch
import torch.distributed as dist

from ..parallel_state import MachineFailed, PeerFailed, rank_at_fault
from ..storage.disk import DiskFailed, FileLock, write_whole
from ..storage.small_files import read_json
from ..system.refusals import MACHINE, UNEXPECTED, refusal_of
from ..system.standard_streams import name_standard_output
from ..system.user_errors import line_of_user
from .flight_recorder import what_it_waited_for, write_record
from .heartbeat import BLAME, SILENT_AFTER, Heartbeat, RankStatus, read_status
from .requests import PREEMPTED

_LOOK_EVERY = 0.1
#: Seconds after which a rank that only saw a failure is told apart from its cause on the same host.
_WAIT = 1.5


def blame_together(beat: Heartbeat) -> str:
    """Return which of the other ranks failed or fell silent, as ``blame`` does; empty if that is not known.

    Every rank asks after a failure. One of them at a time looks at all files, and the others read what it
    found: if each looked, a disk would be asked for as many files as the square of the ranks.
    """
    if beat.run is None:
        return ""
    beat.write()
    name = beat.folder / f"{BLAME}{quote(beat.run, safe='')}"
    looking, verdict = name.with_suffix(".looking"), name.with_suffix(".json")
    deadline = time.monotonic() + _WAIT + SILENT_AFTER
    while True:
        with suppress(OSError, MachineFailed, ValueError):
            others = {rank: str(why) for rank, why in read_json(verdict).items() if rank != str(beat.rank)}
            if others:
                return "; ".join(others.values())
        try:
            lock = FileLock.take(looking)
        except OSError:  # such as a full disk: then alone
            return blame(beat.folder, beat.world, but=beat.rank, run=beat.run)
        if lock is not None:
            break
        if time.monotonic() >= deadline:
            return ""
        time.sleep(_LOOK_EVERY)
    try:
        accused = _look(beat.folder, beat.world, but=beat.rank, run=beat.run, wait=_WAIT)
        if accused:
            with suppress(DiskFailed):
                write_whole(verdict, json.dumps(accused))
        return "; ".join(accused.values())
    finally:
        with suppress(OSError):
            lock.remove()


def blame(folder: Path, world: int, *, but: int, run: str, wait: float = _WAIT) -> str:
    """Return a sentence that names the other ranks of this start that failed or fell silent.

    Returns an empty text if all are alive after ``wait`` seconds. This host cannot see the processes of
    another host. So the call waits longer, until each rank of another host has beaten once more, has ended or
    is silent. It reads the files of all ranks, again and again.
    """
    return "; ".join(_look(folder, world, but=but, run=run, wait=wait).values())


def _look(folder: Path, world: int, *, but: int, run: str, wait: float) -> dict[int, str]:
    began, first = time.monotonic(), None
    while True:
        statuses = {status.rank: status for status in read_status(folder, run=run)}
        # By the clock of the disk, as the beats are: those of hosts differ.
        now = statuses[but].time if but in statuses else time.time()
        first = now if first is None else first
        accused = _accusations(statuses, world, but, now)
        others = [status for status in statuses.values() if status.rank != but]
        unheard = wait > 0 and any(status.unheard(first) for status in others)
        longest = wait + SILENT_AFTER if unheard else wait
        if accused or time.monotonic() - began >= longest:
            return accused
        time.sleep(_LOOK_EVERY)


def _accusations(statuses: Mapping[int, RankStatus], world: int, but: int, now: float) -> dict[int, str]:
    accused = {}
    for rank in set(range(world)) - {but}:
        status = statuses.get(rank)
        if status is None:
            accused[rank] = f"rank {rank} never started"
        elif status.code and status.code != PREEMPTED and status.cause:
            accused[rank] = f"rank {rank} failed in {status.phase} of step {status.step}: {status.error}"
        elif status.silent(now):
            accused[rank] = (
                f"rank {rank} died or hangs in {status.phase} of step {status.step} "
                f"(pid {status.pid} on {status.host})"
            )
    return accused


#: Marks of gloo (its files), NCCL, c10d and TORCH_DISTRIBUTED_DEBUG=DETAIL; words such as "Timed out" are
#: those of others too.
_OF_A_COLLECTIVE = ("/gloo/", "NCCL", "[c10d]", "monitoredBarrier", "mismatch between collectives")
_LESS_MEMORY = "Try a smaller data.micro_batch, more tensor or pipeline ranks, or layout.zero=3"


@contextmanager
def watched(folder: Path, rank: int, world: int, *, run: str | None) -> Iterator[Heartbeat]:
    """Write ``folder/rank<r>.json`` while the block runs: the rank lives; a failure leaves code and message.

    ``run`` names this start; with ``None`` nothing is written before ``publish``, because the folder may be
    another run's. A failed collective becomes ``PeerFailed`` (exit code 3) and names the rank that failed or
    fell silent.
    """
    with Heartbeat(folder, rank, world) as beat:
        if run is not None:
            beat.publish(run)
        with report_error_before_cleanup(beat):
            yield beat


@contextmanager
def report_error_before_cleanup(beat: Heartbeat) -> Iterator[None]:
    """Write an error that leaves the block to the status at once, before anything around the block cleans up.

    Only the first one counts.
    """
    try:
        yield
    except Exception as error:
        cause = rank_at_fault(error, default=beat.rank) == beat.rank
        if cause and not hasattr(error, "exit_code") and is_out_of_memory(error):
            text = f"{beat.place}: out of memory: {str(error).splitlines()[0]}. {_LESS_MEMORY}"
            error = MachineFailed(text)
        code = getattr(error, "exit_code", None)
        if isinstance(code, int):
            beat.end(code, str(error), cause=cause)
            raise error
        if not is_collective_failure(error):
            name_standard_output(error)
            refusal = refusal_of(error)
            if refusal is not None and refusal.code == MACHINE:
                beat.end(MACHINE, str(refusal), cause=cause)
                raise
            place, notes = line_of_user(error.__traceback__), [*getattr(error, "__notes__", ())]
            if place and f"at {place}" not in notes:
                error.add_note(f"at {place}")
            words = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
            beat.end(UNEXPECTED, " ".join(words), cause=cause)
            raise
        if beat.run is not None:
            write_record(beat.folder, beat.rank)
        why = (
            blame_together(beat) or what_it_waited_for(beat.folder, beat.world) or str(error).splitlines()[0]
        )
        text = f"{beat.place}: a collective failed: {why}"
        beat.end(PeerFailed.exit_code, text, cause=False)
        raise PeerFailed(text) from error


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether this rank had no memory left; on a CPU torch raises a plain ``RuntimeError``."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def is_collective_failure(error: Exception) -> bool:
    """Tell whether a peer or the network failed, not this rank; torch has no single type for that."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _OF_A_COLLECTIVE)
    )
