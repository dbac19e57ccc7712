"""Allow one run at a time in a folder: two would write over each other's metrics and checkpoints.

The operating system releases the lock when the last process that holds it ends, even if it is killed. So a
killed run does not block the folder for long; a new run waits some seconds for ranks that still run.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Self

from ..parallel_state import BadInput, ParallelState, together
from ..storage.disk import FileLock, try_lock
from ..storage.file_names import CHECKPOINTS, holds_steps
from .heartbeat import clear_status, make_folder, status_folder, this_start
from .requests import Switches

#: Seconds to wait for the ranks of a run that has just failed to be gone.
_PATIENCE = 10.0
_STANDARD_INPUT = 0
#: What a folder may hold before its first run: what a job leaves there, requests to a run, a status without a
#: lock, what a file system makes.
_BEFORE_A_RUN = {"job-started", "excluded-nodes", "status", CHECKPOINTS, "lost+found", *Switches.names}
#: The same, by endings: recipes, scripts and logs.
_OF_A_JOB = (".toml", ".sh", ".sbatch", ".yaml", ".log", ".out", ".err")


@contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
    """Reserve ``folder`` for this process during the block, and for processes that inherit the descriptor.

    Yields that descriptor. In a folder of another run nothing is touched. Raises ``BadInput`` if another run
    has the folder for 10 seconds; a line says before that it is waited for.
    """
    lock = _take(folder)
    try:
        yield lock.fd
    finally:
        lock.release()


@contextmanager
def only_run_in(folder: Path, state: ParallelState, *, patience: float | None = None) -> Iterator[str]:
    """Reserve ``folder`` for the ranks that enter this block together; yield the name of this start.

    Collective; ``BadInput`` on every rank if another run has the folder for ``patience`` seconds. Rank 0
    holds the lock, unless the launcher that started the ranks does.
    """
    with ExitStack() as locks:

        def take() -> str:
            if state.rank:
                return ""
            if inherits_lock(folder):
                return this_start()
            locks.callback(_take(folder, patience).release)
            return token_hex(8)

        yield together(take, state)[0]


class LockWatch:
    """See in the block whether the lock of a run's folder is still its own: who removes the folder, even to
    make it anew, removes the lock too. Only the ``holder`` looks, and only if there is a lock.
    """

    def __init__(self, folder: Path, *, holder: bool) -> None:
        self._folder, self._locks = folder, ExitStack()
        self._own = _status(_file(folder)) if holder else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()

    def lost(self) -> bool:
        """Tell whether another run may have the folder; where there is no lock, take it again."""
        if self._own is None:
            return False
        status = _status(_file(self._folder))
        if status is None:
            make_folder(self._folder)
            if (lock := FileLock.take(_file(self._folder))) is None:
                return True
            self._locks.callback(lock.release)
            self._own = status = os.fstat(lock.fd)
        return not os.path.samestat(self._own, status)


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def inherits_lock(folder: Path) -> bool:
    """Tell whether the launcher that started this rank holds the lock.

    The launcher passes the lock on as standard input.
    """
    try:
        same = os.path.samestat(os.fstat(_STANDARD_INPUT), os.stat(_file(folder)))
        return same and try_lock(_STANDARD_INPUT)  # holds already, or it is not handed on
    except OSError:
        return False


def _file(folder: Path) -> Path:
    return folder / "run.lock"


def _refuse_folder_of_others(folder: Path) -> None:
    """Refuse a folder with files that are no run's: a new run would write among them, or over them."""
    if _file(folder).exists() or (folder / "events.jsonl").exists() or holds_steps(folder / CHECKPOINTS):
        return
    strange = [
        path.name
        for path in folder.iterdir()
        if path.name not in _BEFORE_A_RUN and path.suffix not in _OF_A_JOB and not path.name.startswith(".")
    ]
    if strange:
        expected, todo = "a new folder, or a run's", "Choose another folder, or move it away"
        actual = f"{folder / min(strange)}, which no run of trilith wrote"
        raise BadInput("recipe", "out", expected=expected, found=actual, todo=todo)


def _take(folder: Path, patience: float | None = None) -> FileLock:
    """Wait for the lock; then delete the status of an earlier run's ranks."""
    make_folder(folder)
    _refuse_folder_of_others(folder)
    patience = _PATIENCE if patience is None else patience
    deadline, announced = time.monotonic() + patience, False
    while True:
        try:
            lock = FileLock.take(_file(folder))
        except OSError as error:
            expected = "a folder that can be written to, with locks"
            failure = f"{_file(folder)}: {error.strerror}"
            raise BadInput("recipe", "out", expected=expected, found=failure) from None
        if lock is not None:
            break
        if time.monotonic() > deadline:
            expected = "a folder that no other run is using"
            todo = "Wait for that run, or choose another folder"
            raise BadInput("recipe", "out", expected=expected, found=f"{folder}, in use", todo=todo)
        if not announced:
            announced = True
            sys.stderr.write(
                f"{folder} is in use by another run: waiting up to {patience:g} s for it to end\n"
            )
            sys.stderr.flush()
        time.sleep(0.2)
    clear_status(status_folder(folder))
    return lock
