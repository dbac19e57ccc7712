"""Steer a run by files in its folder, for users who may not send it a signal.

``touch RUN/stop`` ends the run after the step at hand, with a checkpoint, as SIGTERM does (exit code 75).
``touch RUN/save`` saves after the step at hand, and the run goes on. ``touch RUN/kill`` ends it after the
step at hand without a checkpoint (exit code 3). The first rank looks for the files after each step, removes
the one that it obeys, and tells the other ranks.
"""

from contextlib import suppress
from pathlib import Path

from ..parallel_state import PeerFailed

STOP, SAVE, KILL = "stop", "save", "kill"


class Killed(PeerFailed):
    """Report that the run was ended by the file ``kill``: nothing was saved after the last checkpoint."""


class Switches:
    """Look for the files in a run's folder; ``here``: whether this rank does (the others see none)."""

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
