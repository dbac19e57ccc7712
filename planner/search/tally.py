"""Count the layouts that a search leaves out, by reason, with one example of each reason."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...parallel_state import BadInput


@dataclass(frozen=True, slots=True)
class Reason:
    """State why ``layouts`` layouts are left out. ``example``: the error or the figures of one of them."""

    kind: str
    text: str
    layouts: int
    example: str
    excess: float


@dataclass
class Tally:
    """Collect the reasons. Kinds: "not legal", "memory", "slower"."""

    _counts: dict[tuple[str, str], int] = field(default_factory=dict)
    _examples: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)

    def illegal(self, error: BadInput, layouts: int) -> None:
        """Count layouts that a recipe would refuse. The reason is the key; the example does not repeat it."""
        example = str(error).removeprefix(f"{error.where}: {error.key}: ")
        self.add("not legal", str(error.key), layouts, example)

    def add(self, kind: str, text: str, layouts: int, example: str, *, excess: float = 0.0) -> None:
        """Count layouts. The example with the least ``excess`` is kept, because it is the nearest to
        fitting.
        """
        key = kind, text
        self._counts[key] = self._counts.get(key, 0) + layouts
        if key not in self._examples or excess < self._examples[key][0]:
            self._examples[key] = excess, example

    def include(self, other: "Tally") -> None:
        """Count all that another tally counts."""
        for (kind, text), layouts in other._counts.items():
            excess, example = other._examples[kind, text]
            self.add(kind, text, layouts, example, excess=excess)

    def count(self, kind: str = "") -> int:
        """Return the number of layouts that were left out, for one kind of reason or for all."""
        return sum(count for (counted_kind, _), count in self._counts.items() if kind in ("", counted_kind))

    def __iter__(self) -> Iterator[Reason]:
        """Yield the reasons, those of most layouts first."""
        for key, count in sorted(self._counts.items(), key=lambda counted: -counted[1]):
            excess, example = self._examples[key]
            yield Reason(*key, count, example, excess)
