"""Name the ranks that failed or fell silent, from what all ranks leave on disk."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from ..parallel_state import MachineFailed
from ..storage.small_files import read_json
from .heartbeat import BLAME, SILENT_AFTER, Heartbeat, RankStatus, read_status
from .stop_signals import PREEMPTED

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
            os.close(os.open(looking, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            if time.monotonic() >= deadline:
                return ""
            time.sleep(_LOOK_EVERY)
            continue
        except OSError:  # such as a full disk: then alone
            return blame(beat.folder, beat.world, but=beat.rank, run=beat.run)
        break
    try:
        accused = _look(beat.folder, beat.world, but=beat.rank, run=beat.run, wait=_WAIT)
        if accused:
            with suppress(OSError):
                whole = verdict.with_suffix(".tmp")
                whole.write_text(json.dumps(accused))
                whole.replace(verdict)
        return "; ".join(accused.values())
    finally:
        with suppress(OSError):
            looking.unlink()


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
        known = {status.rank: status for status in read_status(folder, run=run)}
        # By the clock of the disk, as the beats are: those of hosts differ.
        now = known[but].time if but in known else time.time()
        first = now if first is None else first
        accused = _accusations(known, world, but, now)
        unheard = wait > 0 and any(status.unheard(first) for status in known.values() if status.rank != but)
        longest = wait + SILENT_AFTER if unheard else wait
        if accused or time.monotonic() - began >= longest:
            return accused
        time.sleep(_LOOK_EVERY)


def _accusations(known: Mapping[int, RankStatus], world: int, but: int, now: float) -> dict[int, str]:
    accused = {}
    for rank in set(range(world)) - {but}:
        status = known.get(rank)
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
