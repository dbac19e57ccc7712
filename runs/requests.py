"""State what signals and files asked of a run by the end of a step, so that all ranks act after the same one.

``touch RUN/stop`` ends the run after the step at hand, with a checkpoint, as SIGTERM does (exit code 75).
``touch RUN/save`` saves after the step at hand, and the run goes on. ``touch RUN/kill`` ends it after the
step at hand without a checkpoint (exit code 3). The first rank looks for the files after each step, removes
the one that it obeys, and tells the other ranks.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

from ..parallel_state import ParallelState, PeerFailed
from ..system.process_info import process_info


class Killed(PeerFailed):
    """Report that the run was ended by the file ``kill``: nothing was saved after the last checkpoint."""


class Switches:
    """Look for the files in a run's folder; ``here``: whether this rank does (the others see none)."""

    names = stop, save, kill = "stop", "save", "kill"

    def __init__(self, folder: Path, *, here: bool) -> None:
        self._folder, self._here = folder, here

    def on(self, name: str) -> bool:
        """Tell whether the file is there; one look at the file system."""
        return self._here and (self._folder / name).exists()

    def off(self, name: str) -> None:
        """Remove the file, if it is there: it was obeyed, or it is an earlier run's."""
        if self._here:
            with suppress(OSError):  # a folder that cannot be written now: the next start removes it
                (self._folder / name).unlink(missing_ok=True)


#: Seconds from the signal in which to have saved and left: torchrun kills after 30.
GRACE = 25.0

#: EX_TEMPFAIL of sysexits.h: stopped from outside with a committed checkpoint; start the same command again.
PREEMPTED = 75


#: Numbers by which ranks tell each other why to stop. Add the rank to the second one.
_ASKED, _LAUNCHER_OF_FIRST = 1, 2


class Preempted(RuntimeError):
    """Report that the run was asked to stop and has saved."""

    exit_code = PREEMPTED


@contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Give SIGTERM and SIGINT to ``handler`` in the context; then restore the old handlers. In a thread that
    may not handle signals (a test, a notebook) nothing is given to it.
    """
    before = {}
    try:
        with suppress(ValueError):  # not the main thread
            for number in (signal.SIGTERM, signal.SIGINT):
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class StopSignals:
    """Set only ``stop_requested`` on SIGTERM and SIGINT in the context, see ``handled_signals``.

    If the context still lasts ``grace`` seconds after the signal (a step that takes longer), the process ends
    with exit code 3, and with the checkpoints that it had.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self.stop_requested, self.grace = False, grace
        self._launcher = os.getppid()
        self._left, self._restored = threading.Event(), ExitStack()

    def __enter__(self) -> Self:
        self._restored.enter_context(handled_signals(self._note))
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        self._restored.close()

    def asked(self, rank: int) -> int:
        """Return 0 if nobody has asked this rank to stop, otherwise a number for ``why_stopped``.

        The largest number of any rank says why the run stops.
        """
        if not self.stop_requested:
            return 0
        # The system sends the signal when the launcher's first thread is gone (see ``end_with_parent``), and
        # names another parent only when its last thread is.
        launcher = process_info(self._launcher)
        died = os.getppid() != self._launcher or (launcher is not None and not launcher.alive)
        return _LAUNCHER_OF_FIRST + rank if died else _ASKED

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.stop_requested:
            self.stop_requested = True
            threading.Thread(target=self._leave, name="grace", daemon=True).start()

    def _leave(self) -> None:
        if not self._left.wait(self.grace):
            sys.stderr.write(f"error: asked to stop, and the step at hand took over {self.grace:g} s\n")
            sys.stderr.flush()
            os._exit(PeerFailed.exit_code)


def why_stopped(asked: int) -> str:
    """Return the words for the largest number that ``StopSignals.asked`` returned on any rank."""
    if asked < _LAUNCHER_OF_FIRST:
        return "asked to stop"
    return f"the launcher of rank {asked - _LAUNCHER_OF_FIRST} died"


@dataclass(frozen=True, slots=True)
class Requests:
    """Hold what was asked of any rank.

    ``stop``: 0, or a number that ``why_stopped`` puts into words. ``failed``: a save in the background did.
    ``lost``: another run may have the folder.
    """

    stop: int
    save: bool
    kill: bool
    failed: bool
    lost: bool


def agree_on_requests(
    signals: StopSignals, switches: Switches, state: ParallelState, *, failed: bool, lost: bool, memory: int
) -> tuple[Requests, int]:
    """Return what was asked of any rank, and the largest ``memory`` of a rank, by one reduction.

    Signals and errors reach ranks at different moments. Collective over all ranks.
    """
    asked = signals.asked(state.rank) or switches.on(Switches.stop)
    numbers = [asked, switches.on(Switches.save), switches.on(Switches.kill), failed, lost, memory]
    if state.layout.world > 1:
        largest = torch.tensor(numbers, dtype=torch.int64)
        # Not over the group of the files: a save in the background may be using it.
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        numbers = largest.tolist()
    stop, *others, most_memory = numbers
    return Requests(stop, *map(bool, others)), most_memory
