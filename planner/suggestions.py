"""Find the changes of a recipe that make its plan fit the device; the change that costs least time comes
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """State overrides of a recipe that belong together, such as ``memory.checkpointing=full``."""

    overrides: tuple[str, ...]

    def replaces(self, other: Change) -> bool:
        """Tell whether this change sets a key of the other change to another value."""
        keys = {text.partition("=")[0] for text in self.overrides}
        return any(text.partition("=")[0] in keys for text in other.overrides)


@dataclass(frozen=True)
class Remedy:
    """State a change, or several together, and the bytes that the heaviest rank then needs."""

    changes: tuple[Change, ...]
    total: int

    @property
    def overrides(self) -> str:
        return " ".join(text for change in self.changes for text in change.overrides)


def changes_that_fit(
    changes: Sequence[Change], total: Callable[[Sequence[Change]], int | None], room: int, *, most: int = 3
) -> list[Remedy]:
    """Return the changes, cheapest first, that bring ``total`` down to ``room``: each alone, or else several
    together.

    ``total`` returns the bytes of a rank under some changes, or ``None`` if a recipe cannot have them. If no
    single change is enough, changes are added one after the other until they are enough; a change that does
    not lower the bytes is left out. ``room``: bytes of the device. ``most``: how many results to return.
    """
    alone = [Remedy((change,), size) for change in changes if (size := total([change])) is not None]
    enough = [fit for fit in alone if fit.total <= room]
    if enough:
        return enough[:most]
    together: list[Change] = []
    best = total([])
    for change in changes:
        tried = [*(chosen for chosen in together if not change.replaces(chosen)), change]
        size = total(tried)
        if size is None or (best is not None and size >= best):
            continue
        together, best = tried, size
        if size <= room:
            return [Remedy(tuple(together), size)]
    return []
