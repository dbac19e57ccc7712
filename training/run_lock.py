"""One run at a time in a folder: two would write over each other's metrics and checkpoints."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoints import together
from ..parallel_state import BadInput, ParallelState
from .status import make_folder

#: Seconds to wait for the ranks of a run that has just failed to be gone.
_PATIENCE = 10.0


@contextmanager
def only_run_in(folder: Path, state: ParallelState, *, patience: float = _PATIENCE) -> Iterator[None]:
    """While it lasts, ``folder`` is this run's. Collective; ``BadInput`` on every rank if another run has it
    for ``patience`` seconds.

    Rank 0 holds the lock, and the system gives it up for a rank that dies, so a killed run blocks nobody.
    """
    held: list[int] = []
    try:
        world, group = state.layout.world, state.file_group
        together(lambda: _take(folder, state.rank, patience, held), world=world, group=group)
        yield
    finally:
        for fd in held:
            os.close(fd)


def _take(folder: Path, rank: int, patience: float, held: list[int]) -> None:
    if rank:
        return
    make_folder(folder)
    fd = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    held.append(fd)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise BadInput(
                    "recipe",
                    "out",
                    expected="a folder that no other run is using",
                    found=f"{folder}, in use",
                    todo="Wait for that run, or choose another folder",
                ) from None
        time.sleep(0.2)
