"""Skip updates if the loss or the gradient norm is far above those of the last steps."""

import statistics
from collections import deque
from typing import Any

from ..recipes.optimizer_sections import SpikeSection


class Spikes:
    """Hold a window of the last steps' losses and gradient norms, and tell whether a step is a spike.

    A spike is a loss or norm more than ``deviations`` standard deviations above the window's mean. No step is
    a spike before half a window has been seen. A spike enters the window like any step: a higher level that
    stays is soon normal, so a run cannot skip steps for ever. Source: OLMo-core's ``SkipStepOptimizer``.
    """

    def __init__(self, section: SpikeSection) -> None:
        self.section = section
        self.losses: deque[float] = deque(maxlen=section.window)
        self.norms: deque[float] = deque(maxlen=section.window)

    def is_one(self, loss: float, norm: float) -> bool:
        """Tell whether a step with this loss and gradient norm should not update; it is not noted yet."""
        if len(self.losses) < max(2, self.section.window // 2):
            return False
        return self._leaps(loss, self.losses) or self._leaps(norm, self.norms)

    def note(self, loss: float, norm: float) -> None:
        self.losses.append(loss)
        self.norms.append(norm)

    def _leaps(self, value: float, seen: deque[float]) -> bool:
        return value > statistics.fmean(seen) + self.section.deviations * statistics.stdev(seen)

    def remember(self) -> dict[str, Any]:
        """Return plain data for a checkpoint; JSON keeps every bit of a float."""
        return {"losses": [*self.losses], "norms": [*self.norms]}

    def restore(self, memory: dict[str, Any]) -> None:
        for mine, saved in ((self.losses, memory["losses"]), (self.norms, memory["norms"])):
            mine.clear()
            mine.extend(float(value) for value in saved)
