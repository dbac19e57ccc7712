"""Count the layouts that a search leaves out, by reason, with one example of each reason."""

from collections.abc import Iterator
from typing import NamedTuple

from ...parallel_state import BadInput


class Reason(NamedTuple):
    """State why ``layouts`` layouts are left out. ``example``: the error or the figures of one of them."""

    kind: str
    text: str
    layouts: int
    example: str
    excess: float = 0.0


class Tally:
    """Collect the reasons. Kinds: "not legal", "not tried", "memory", "slower"."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], Reason] = {}

    def illegal(self, error: BadInput, layouts: int) -> None:
        """Count layouts that a recipe would refuse. The reason is the key; the example does not repeat it."""
        example = str(error).removeprefix(f"{error.where}: {error.key}: ")
        self.add(Reason("not legal", str(error.key), layouts, example))

    def add(self, reason: Reason) -> None:
        """Count layouts. The example with the least ``excess`` is kept, because it is nearest to fitting."""
        earlier = self._reasons.get(reason[:2], reason._replace(layouts=0))
        nearest = reason if reason.excess < earlier.excess else earlier
        self._reasons[reason[:2]] = nearest._replace(layouts=earlier.layouts + reason.layouts)

    def include(self, other: "Tally") -> None:
        """Count all that another tally counts."""
        for reason in other._reasons.values():
            self.add(reason)

    def count(self, kind: str) -> int:
        """Return the number of layouts that were left out for one kind of reason."""
        return sum(reason.layouts for reason in self._reasons.values() if reason.kind == kind)

    def __iter__(self) -> Iterator[Reason]:
        """Yield the reasons, those of most layouts first."""
        return iter(sorted(self._reasons.values(), key=lambda reason: -reason.layouts))
