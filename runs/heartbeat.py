"""Write and read what each rank leaves on disk while it runs and when it ends: ``status/rank<r>.json``.

From these files the other ranks tell which rank failed first. torchrun turns every exit code into 1, and the
victim of a hang may end before its cause; in the run's folder all ranks, on all hosts, can see each other
without a collective.
"""

import json
import os
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

from ..parallel_state import MachineFailed, from_os_error
from ..storage.small_files import read_json
from ..storage.strict_json import fits
from ..system.process_info import has_process_info, process_info, start_of
from .requests import PREEMPTED

#: A rank whose file is older than this many seconds is silent. Ranks beat once a second.
SILENT_AFTER = 4.0
_BEAT = 1.0
#: How files begin in which a rank says whom it blames.
BLAME = "blame-"
#: A new step is written when it has lasted from one beat to the next, so that a hang is seen, or else every
#: ``_STEP_EVERY`` seconds; a new phase at once.
_STEP_EVERY = 10.0
_OF_A_RANK = re.compile(r"(collectives-|nccl-)?rank[0-9]+(\.json|\.tmp)?")


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Hold the status of one rank, as it stands in its file.

    ``code`` is ``None`` while the rank runs, then its exit code; ``time`` is when it was last alive (epoch,
    s, by the clock of the disk). ``started`` is the start of process ``pid``, in the system's ticks.
    ``cause`` is false for a rank that only saw another one fail. ``run`` is the same for ranks that were
    started together, and for no others.
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
    started: int = 0

    def silent(self, now: float) -> bool:
        """Tell whether the rank has stopped without an end: it is silent.

        Its process is gone or stopped on this host, or its last beat was long before ``now``. A process that
        started at another time only has its number.
        """
        if self.code is not None:
            return False
        if self.host == socket.gethostname() and has_process_info():
            info = process_info(self.pid)
            if info is None or not info.alive or info.state == "T" or self.started not in (0, info.started):
                return True
        return now - self.time > SILENT_AFTER

    def unheard(self, since: float) -> bool:
        """Tell whether the rank runs on another host and has not beaten after ``since`` (the disk's time)."""
        return self.code is None and self.host != socket.gethostname() and self.time <= since


class Heartbeat:
    """Write this rank's status, and touch the file every second from a thread.

    So other ranks can tell a rank that waits from a rank that was stopped or killed, which falls silent. A
    beat sets the time of a file that is kept open: it reads and makes nothing, on the disk that all ranks
    share, and it is no beat of a later start, whose file has the same name. Where steps take less than a
    beat, the file's step may be 10 s old.
    Leaving the context without ``end`` notes a good end. Nothing is written before ``publish``, because until
    then the folder may belong to another run.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.rank, self.world, self.folder = rank, world, folder
        self._path = folder / f"rank{rank}.json"
        pid = os.getpid()
        self._status = RankStatus(
            rank, None, "start", 0, "", 0.0, pid, socket.gethostname(), started=start_of(pid)
        )
        self.run: str | None = None
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._written = (self._status.step, 0.0)  # the step on the disk, and when it was written
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._status.code is None and error is None:
            self.end(0)
        self._stop()
        if self._file is not None:
            self._file.close()

    def publish(self, run: str) -> None:
        """Start to write the status, now and every second: the folder is ours, ``run`` is this start's name.

        Only the first call counts.
        """
        if self.run is None:
            make_folder(self.folder)
            self._status = replace(self._status, run=run)
            self.write(first=True)
            self.run = run
            self._thread.start()

    def at(self, phase: str, step: int) -> None:
        """Note what this rank does now; a new phase is written at once, otherwise with the next beat."""
        self.write(now=phase != self._status.phase, phase=phase, step=step)

    @property
    def place(self) -> str:
        return f"{self._status.phase} of step {self._status.step}"

    def end(self, code: int, error: str = "", *, cause: bool = True) -> None:
        """Write the last status of this rank at once. Only the first call counts."""
        if self._status.code is None:
            self._stop()
            self.write(code=code, error=error, cause=cause)

    def _stop(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _beat(self) -> None:
        before = -1
        while not self._done.wait(_BEAT):
            now, (step, written_at) = self._status.step, self._written
            if now != step and (now == before or time.monotonic() - written_at >= _STEP_EVERY):
                self.write()
            before = now
            with self._lock, suppress(OSError):
                if self._file is not None:
                    os.utime(self._file.fileno())

    def write(self, *, now: bool = True, first: bool = False, **changes: Any) -> None:
        """Note the changes and, ``now``, put them on the disk; a full disk must not hide what went wrong.

        Beats of other ranks can then be told to be newer than what happened.
        """
        with self._lock:
            self._status = replace(self._status, time=time.time(), **changes)
            if first or (now and self.run is not None and not self._replaced()):
                with suppress(OSError):
                    self._replace()

    def _replace(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.parent.mkdir(parents=True, exist_ok=True)  # in the place of a run's folder that was moved
        file = temporary.open("w")
        try:
            file.write(json.dumps(asdict(self._status)))
            file.flush()
            temporary.replace(self._path)
        except OSError:
            with suppress(OSError):  # of a full disk once more
                file.close()
            raise
        self._written = self._status.step, time.monotonic()
        if self._file is not None:
            self._file.close()
        self._file = file

    def _replaced(self) -> bool:
        """Tell whether a later start uses the folder now; then a rank that ends slowly writes no more."""
        with suppress(OSError, MachineFailed, ValueError, TypeError):
            return bool(_read(self._path).run != self.run)
        return False


def status_folder(out: Path) -> Path:
    """Return the folder, inside the run's folder, where ranks leave their status."""
    return out / "status"


def make_folder(folder: Path) -> None:
    """Make a run's folder; ``BadInput`` if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = "a folder that can be made and written to"
        raise from_os_error(error, f"recipe: out: {folder}", expected=expected) from None


def this_start() -> str:
    """Return the name that a launcher of ours gave to the ranks that it started together."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def _read(path: Path) -> RankStatus:
    fields = read_json(path)
    if not fits(fields, RankStatus):
        raise ValueError(f"{path}: not the status of a rank")
    return RankStatus(**(fields | {"time": path.stat().st_mtime}))


def all_status(folder: Path) -> list[RankStatus]:
    """Return every status in the folder, by rank, whatever start it is of.

    Files that cannot be read are skipped (another version, a full disk).
    """
    statuses = []
    for path in folder.glob("rank*.json"):
        with suppress(OSError, MachineFailed, ValueError, TypeError):
            statuses.append(_read(path))
    return sorted(statuses, key=lambda status: status.rank)


def read_status(folder: Path, *, run: str) -> list[RankStatus]:
    """Return every status of this start, by rank."""
    return [status for status in all_status(folder) if status.run == run]


def clear_status(folder: Path) -> None:
    """Delete what an earlier run's ranks left: status, also half of it, blame, records of collectives."""
    for path in folder.glob("*"):
        if _OF_A_RANK.fullmatch(path.name) or path.name.startswith(BLAME):
            path.unlink(missing_ok=True)


def first_failure(folder: Path, *, run: str) -> RankStatus | None:
    """Return the earliest end with a code other than 0.

    A rank that is a cause comes before any other, and one that failed before one that was asked to stop.
    """
    ended = [status for status in read_status(folder, run=run) if status.code]
    failed = [status for status in ended if status.code != PREEMPTED] or ended
    causes = [status for status in failed if status.cause] or failed
    return min(causes, key=lambda status: status.time, default=None)
