"""SIGTERM and SIGINT: finish the step, save, leave with exit code 75; a second signal changes nothing."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

#: EX_TEMPFAIL of sysexits.h: stopped from outside with a committed checkpoint; start the same command again.
PREEMPTED = 75


class Preempted(RuntimeError):
    """The run was asked to stop and has saved."""

    exit_code = PREEMPTED


class StopSignals:
    """While the context lasts, SIGTERM and SIGINT only set ``asked``; afterwards the old handlers are back.

    In a thread that may not handle signals (a test, a notebook) it never asks.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread
                return self
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
