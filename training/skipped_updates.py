"""Decide which updates are skipped: those whose gradients overflow under a loss scale, and spikes."""

import statistics
from collections import deque
from typing import Any

from ..parallel_state import NotTrained
from ..recipes.optimizer_sections import LossScaleSection, SpikeSection
from ..system import counted

#: So many overflows in a row stop a run: from the usual 2^16, or Megatron's 2^32, the scale is then below 1.
MOST_OVERFLOWS = 40


class LossScale:
    """Hold a power of two that halves when a gradient overflows and doubles after a number of good steps.

    It depends only on numbers that are equal on every rank, so ranks need not agree on it. A power of two
    changes no bit of a gradient that neither overflows nor underflows. Without it fp16 gradients partly
    underflow to zero. ``section``: the recipe's numbers. Source: Micikevicius et al. 2018, section 3.2; the
    numbers are torch's ``GradScaler``'s.
    """

    def __init__(self, section: LossScaleSection | None = None) -> None:
        self.section = section or LossScaleSection()
        self.value, self.good, self.overflows = self.section.initial, 0, 0

    def overflowed(self) -> bool:
        """Halve the scale; return ``False`` if it is at its minimum, so that scaling is not to blame.

        ``NotTrained`` after ``MOST_OVERFLOWS`` in a row.
        """
        self.overflows += 1
        if self.overflows >= MOST_OVERFLOWS:
            raise NotTrained(
                f"{counted(self.overflows, 'step')} in a row were skipped, down to a loss scale of "
                f"{self.value:g}: gradients overflow at each; set a smaller loss_scale.initial"
            )
        lower = self.value / 2
        if lower < self.section.minimum:
            return False
        self.value, self.good = lower, 0
        return True

    def went_well(self) -> None:
        """Note a step whose gradients were finite."""
        self.good, self.overflows = self.good + 1, 0
        if self.section.growth_interval and self.good >= self.section.growth_interval:
            self.value, self.good = min(self.value * 2, self.section.maximum), 0

    def remember(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"value": self.value, "good": self.good}

    def restore(self, memory: dict[str, Any]) -> None:
        self.value, self.good = float(memory["value"]), int(memory["good"])


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
