"""Wait for the ranks that this launcher started, and no others, and end those that hang."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from ..system.process_info import children_of, environment_of, process_info
from .heartbeat import RankStatus, read_status
from .stop_signals import GRACE, PREEMPTED

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
