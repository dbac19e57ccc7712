"""Hold what a rank has on its device at the worst instant of an action or of a step."""

from __future__ import annotations

from typing import NamedTuple


class Peak(NamedTuple):
    """State the bytes at an instant: all of them, activations and messages, and what is not there: gradients
    that last and that no backward has made yet, and weights that are dropped already.
    """

    bytes: float
    resident: float
    messages: float
    missing: float
    dropped: float

    def after(self, nbytes: float, messages: float, missing: float) -> Peak:
        """Return the peak where so many bytes are held, with those of messages, and so many are missing."""
        size = self.bytes + nbytes - missing
        return Peak(size, self.resident + nbytes, messages, self.missing + missing, self.dropped)
