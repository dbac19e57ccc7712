"""Scale the loss dynamically: fp16 gradients of the plain loss would partly underflow to zero.

Source: Micikevicius et al. 2018, section 3.2; the numbers are torch's ``GradScaler``'s.
"""

from typing import Any

from ..parallel_state import NotTrained
from ..recipes.optimizer_sections import LossScaleSection

#: So many overflows in a row stop a run: from the usual 2^16, or Megatron's 2^32, the scale is then below 1.
MOST_OVERFLOWS = 40


class LossScale:
    """Hold a power of two that halves when a gradient overflows and doubles after a number of good steps.

    It depends only on numbers that are equal on every rank, so ranks need not agree on it. A power of two
    changes no bit of a gradient that neither overflows nor underflows. ``section``: the recipe's numbers.
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
                f"{self.overflows} steps in a row were skipped, down to a loss scale of {self.value:g}: "
                "gradients overflow at each; set a smaller loss_scale.initial"
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
