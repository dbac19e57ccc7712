"""Scale the loss dynamically: fp16 gradients of the plain loss would partly underflow to zero.

Source: Micikevicius et al. 2018, section 3.2; the numbers are torch's ``GradScaler``'s.
"""

from __future__ import annotations

from typing import Any

from ..recipes.optimizer_sections import LossScaleSection


class LossScale:
    """Hold a power of two that halves when a gradient overflows and doubles after a number of good steps.

    It depends only on numbers that are equal on every rank, so ranks need not agree on it. A power of two
    changes no bit of a gradient that neither overflows nor underflows.
    """

    def __init__(self, section: LossScaleSection) -> None:
        self.section = section
        self.value, self.good = section.initial, 0

    def overflowed(self) -> bool:
        """Halve the scale; return ``False`` if it is at its minimum, so that scaling is not to blame."""
        lower = self.value / 2
        if lower < self.section.minimum:
            return False
        self.value, self.good = lower, 0
        return True

    def went_well(self) -> None:
        """Note a step whose gradients were finite."""
        self.good += 1
        if self.section.growth_interval and self.good >= self.section.growth_interval:
            self.value, self.good = min(self.value * 2, self.section.maximum), 0

    def remember(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"value": self.value, "good": self.good}

    def restore(self, memory: dict[str, Any]) -> None:
        self.value, self.good = float(memory["value"]), int(memory["good"])
