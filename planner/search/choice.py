"""Define a choice of the search, and count the layouts that it leaves out, each reason with one example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...layers import Checkpointing
from ...parallel_state import BadInput, Layout
from ...pipeline import ScheduleName
from ...recipes.recipe import Recipe, parse_recipe
from .request import Request


@dataclass(frozen=True, slots=True)
class Choice:
    """State a layout, its schedule, the rows of a micro-batch, activation checkpointing, and offload."""

    layout: Layout
    schedule: ScheduleName = "1f1b"
    micro_batch: int = 1
    checkpointing: Checkpointing = "none"
    offload: bool = False

    def micro_batches(self, global_batch: int) -> int:
        """Return the number of micro-batches of a rank in a step."""
        return global_batch // (self.layout.data * self.micro_batch)

    @property
    def cut(self) -> tuple[int, ...]:
        """Return the axes that cut the model; a search shows only the fastest layout of each cut."""
        layout = self.layout
        return layout.tensor, layout.context, layout.pipeline, layout.expert

    @property
    def needs(self) -> tuple[int, ...]:
        """Return what makes a layout less simple, what matters most first: axes beside data, context ranks,
        computing again, several stages on a rank, and replicas.
        """
        layout = self.layout
        return (
            sum(size > 1 for size in self.cut),
            layout.context > 1,
            self.checkpointing != "none",
            layout.virtual_stages > 1,
            layout.zero > 0 and layout.data_replicate > 1,
        )

    @property
    def keys(self) -> dict[str, dict[str, Any]]:
        """Return the keys of a recipe, by section, that differ from their defaults."""
        axes, layout = self.layout, dict[str, Any]()
        for name in (*("tensor", "sequence", "context", "ring", "pipeline"),
                     *("data", "data_replicate", "expert", "zero")):  # fmt: skip
            number = getattr(axes, name) if axes.zero or name != "data_replicate" else 1
            if number is True or number > (name != "zero"):  # by identity: True is 1
                layout[name] = number
        if axes.pipeline > 1:
            layout["schedule"] = self.schedule
            layout |= {"virtual_stages": axes.virtual_stages} if axes.virtual_stages > 1 else {}
        memory: dict[str, Any] = {"checkpointing": self.checkpointing} if self.checkpointing != "none" else {}
        memory |= {"offload": True} if self.offload else {}
        return {"layout": layout, "data": {"micro_batch": self.micro_batch}, "memory": memory}

    def __str__(self) -> str:
        """Return the layout in one line, in the words of a recipe."""
        axes = self.keys["layout"]
        schedule = [axes.pop("schedule")] if "schedule" in axes else []
        words = [key if number is True else f"{key} {number}" for key, number in axes.items()]
        words += [*schedule, f"micro_batch {self.micro_batch}"]
        words += [] if self.checkpointing == "none" else [f"checkpointing {self.checkpointing}"]
        return ", ".join(words + ["offload"] * self.offload)


def raw_recipe(request: Request, choice: Choice) -> dict[str, Any]:
    """Return the recipe of a choice as plain data."""
    raw = {key: dict(value) if isinstance(value, Mapping) else value for key, value in request.raw.items()}
    for section, keys in choice.keys.items():
        if keys:
            raw[section] = raw.get(section, {}) | keys
    return raw


def recipe_of(request: Request, choice: Choice) -> Recipe:
    """Return the checked recipe of a choice; ``BadInput`` if the checks of a recipe refuse it."""
    return parse_recipe(raw_recipe(request, choice), f"plan {request.name}")


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

    def include(self, other: Tally) -> None:
        """Count all that another tally counts."""
        for reason in other._reasons.values():
            self.add(reason)

    def count(self, kind: str) -> int:
        """Return the number of layouts that were left out for one kind of reason."""
        return sum(reason.layouts for reason in self._reasons.values() if reason.kind == kind)

    def __iter__(self) -> Iterator[Reason]:
        """Yield the reasons, those of most layouts first."""
        return iter(sorted(self._reasons.values(), key=lambda reason: -reason.layouts))
