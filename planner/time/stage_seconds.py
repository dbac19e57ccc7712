"""Add up the seconds of one pipeline stage for one micro-batch, by what they are spent on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ...pipeline.schedule_actions import Kind


@dataclass
class StageSeconds:
    """Add up the seconds of one stage's forward and backward of one micro-batch, by part.

    ``seconds``, ``costs`` and ``parts`` are computed once: read them after the last ``add``.
    """

    forward: dict[str, float] = field(default_factory=dict)
    inputs: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def add(self, direction: str, part: str, seconds: float, times: int = 1) -> None:
        parts: dict[str, float] = getattr(self, direction)
        parts[part] = parts.get(part, 0.0) + seconds * times

    def include(self, module_seconds: StageSeconds, times: int) -> None:
        """Add the seconds of ``times`` modules that take ``module_seconds`` each."""
        for direction in ("forward", "inputs", "weights"):
            for part, seconds in getattr(module_seconds, direction).items():
                self.add(direction, part, seconds, times)

    def copy(self) -> StageSeconds:
        """Return seconds of its own, to which more can be added."""
        return StageSeconds(dict(self.forward), dict(self.inputs), dict(self.weights))

    def total(self, direction: str) -> float:
        parts: dict[str, float] = getattr(self, direction)
        return sum(parts.values())

    @cached_property
    def seconds(self) -> float:
        return self.costs["F"] + self.costs["B"]

    @cached_property
    def costs(self) -> dict[Kind, float]:
        inputs, weights = self.total("inputs"), self.total("weights")
        return {"F": self.total("forward"), "I": inputs, "W": weights, "B": inputs + weights}

    @cached_property
    def parts(self) -> dict[str, float]:
        parts: dict[str, float] = {}
        for direction in (self.forward, self.inputs, self.weights):
            for name, seconds in direction.items():
                parts[name] = parts.get(name, 0.0) + seconds
        return parts
