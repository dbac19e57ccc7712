"""Dynamic loss scaling: fp16 gradients are computed of a multiple of the loss, or small ones would be zero.

Source: Micikevicius et al. 2018, section 3.2; the numbers are torch's ``GradScaler``'s.
"""

from __future__ import annotations

from typing import Any

from ..recipes.sections import LossScaleSection


class LossScale:
    """A power of two that halves when a gradient overflows and doubles after so many steps without.

    It sees only what is the same on every rank, so it is the same on every rank: there is nothing to agree on
    here. Powers of two change no bit of a gradient that neither overflows nor underflows.
    """

    def __init__(self, section: LossScaleSection) -> None:
        self.section = section
        self.value, self.good = section.initial, 0

    def overflowed(self) -> bool:
        """Halve; ``False`` if the scale is at its minimum already, so that scaling is not to blame."""
        lower = self.value / 2
        if lower < self.section.minimum:
            return False
        self.value, self.good = lower, 0
        return True

    def went_well(self) -> None:
        """A step's gradients were finite."""
        self.good += 1
        if self.section.growth_interval and self.good >= self.section.growth_interval:
            self.value, self.good = min(self.value * 2, self.section.maximum), 0

    def remember(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"value": self.value, "good": self.good}

    def restore(self, memory: dict[str, Any]) -> None:
        self.value, self.good = float(memory["value"]), int(memory["good"])
