"""What each rank leaves on disk while it runs and when it ends: ``status/rank<r>.json``, and how to read
blame from it.

torchrun flattens every exit code to 1 and shows the victim of a hang, not its cause; the run's folder is
where all ranks, on all hosts, can see each other without a collective.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from ..parallel_state import BadInput
from .preempt import PREEMPTED

#: A rank whose file is older than this many seconds is silent. Ranks beat once a second.
SILENT_AFTER = 4.0
_BEAT = 1.0


@dataclass(frozen=True, slots=True)
class RankStatus:
    """``code`` is ``None`` while the rank runs, then its exit code; ``time`` is when it was last alive
    (epoch, s, by the clock of the disk). ``cause`` is false for a rank that only saw another one fail.
    ``run`` is alike on the ranks that were started together.
    """

    rank: int
    code: int | None
    phase: str
    step: int
    error: str
    time: float
    pid: int
    host: str
    cause: bool = True
    run: str = ""

    def silent(self, now: float) -> bool:
        """Whether it neither ended nor lives: its process is gone or stopped here, or its last beat was long
        before ``now``.
        """
        if self.code is not None:
            return False
        if self.host == socket.gethostname() and _state_of(self.pid) in ("", "Z", "X", "T"):
            return True
        return now - self.time > SILENT_AFTER


def _state_of(pid: int) -> str:
    """Linux's letter for a process: Z for a dead one not yet waited for, T for a stopped one; empty if there
    is none.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "" if Path("/proc/self").exists() else "?"


class Heartbeat:
    """Writes this rank's status every second from a thread, so that a rank that waits is alive and one that
    was stopped or killed is silent. Leaving the context without ``end`` says that it ended well.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank{rank}.json"
        self._status = RankStatus(
            rank, None, "start", 0, "", 0.0, os.getpid(), socket.gethostname(), run=this_start()
        )
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        make_folder(self._path.parent)
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._status.code is None and error is None:
            self.end(0)
        self._stop()

    def at(self, phase: str, step: int) -> None:
        """What this rank does now; written at once where the phase is new, else with the next beat."""
        new = phase != self._status.phase
        self._write(now=new, phase=phase, step=step)

    @property
    def place(self) -> str:
        return f"{self._status.phase} of step {self._status.step}"

    def end(self, code: int, error: str = "", *, cause: bool = True) -> None:
        """The last word of this rank; written at once. The first call counts."""
        if self._status.code is None:
            self._stop()
            self._write(code=code, error=error, cause=cause)

    def _stop(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _beat(self) -> None:
        while not self._done.wait(_BEAT):
            self._write()

    def _write(self, *, now: bool = True, **changes: object) -> None:
        """Note the changes and, ``now``, put them on the disk; a full disk must not hide what went wrong."""
        with self._lock:
            self._status = _changed(self._status, time=time.time(), **changes)
            if now:
                with suppress(OSError):
                    temporary = self._path.with_suffix(".tmp")
                    temporary.write_text(json.dumps(asdict(self._status)))
                    temporary.replace(self._path)


def _changed(status: RankStatus, **changes: object) -> RankStatus:
    return RankStatus(**(asdict(status) | changes))


def make_folder(folder: Path) -> None:
    """``BadInput`` where a run's folder cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = "a folder that can be made and written to"
        raise BadInput("recipe", "out", expected=expected, found=f"{folder}: {error.strerror}") from None


def this_start() -> str:
    """What the ranks that torchrun started together have in common, and no earlier start has."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(os.environ.get(name, "") for name in names)


def read_status(folder: Path, *, run: str | None = None) -> list[RankStatus]:
    """Every rank's status, by rank; only those of ``run``, if it is given. A file that makes no sense, left
    by another version or a full disk, is passed over.
    """
    found = []
    for path in folder.glob("rank*.json"):
        with suppress(OSError, ValueError, TypeError):
            status = RankStatus(**(json.loads(path.read_text()) | {"time": path.stat().st_mtime}))
            if run is None or status.run == run:
                found.append(status)
    return sorted(found, key=lambda status: status.rank)


def clear_status(folder: Path) -> None:
    """Forget an earlier run's."""
    for path in folder.glob("rank*.json"):
        path.unlink()


def first_failure(folder: Path) -> RankStatus | None:
    """The earliest end with a code other than 0, that of a rank which is a cause before any other, and one
    that failed before one that was asked to stop.
    """
    ended = [status for status in read_status(folder) if status.code]
    failed = [status for status in ended if status.code != PREEMPTED] or ended
    causes = [status for status in failed if status.cause] or failed
    return min(causes, key=lambda status: status.time, default=None)


def blame(folder: Path, world: int, *, but: int, run: str | None = None, wait: float = 1.5) -> str:
    """Which of the other ranks (of ``run``) failed, or fell silent, as a sentence; empty if all are alive
    after ``wait`` seconds.
    """
    deadline = time.monotonic() + wait
    while True:
        said = _accusations(folder, world, but, run)
        if said or time.monotonic() > deadline:
            return said
        time.sleep(0.1)


def _accusations(folder: Path, world: int, but: int, run: str | None) -> str:
    known = {status.rank: status for status in read_status(folder, run=run)}
    # By the clock of the disk, as the beats are: those of hosts differ.
    now = known[but].time if but in known else time.time()
    said = []
    for rank in set(range(world)) - {but}:
        status = known.get(rank)
        if status is None:
            said.append(f"rank {rank} never started")
        elif status.code and status.code != PREEMPTED and status.cause:
            said.append(f"rank {rank} failed in {status.phase} of step {status.step}: {status.error}")
        elif status.silent(now):
            said.append(
                f"rank {rank} died or hangs in {status.phase} of step {status.step} (pid {status.pid})"
            )
    return "; ".join(said)
