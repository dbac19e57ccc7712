"""Describe a fault of a module in a layout, and how the ranks of a layout belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...parallel_state import Layout

T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """Describe the first fault of a module in a layout.

    ``module``: the first that differs, in the order of computation; ``phase``: ``structure``, ``forward``,
    ``loss``, ``backward``, ``gradient``, ``update``. ``relative``: the difference over the largest element.
    """

    module: str
    phase: str
    relative: float
    said: str
    #: Whether the only fault so far is that partial values were not summed.
    unsummed: bool = False


@dataclass(frozen=True)
class Figures:
    """Hold the largest relative differences of one layout."""

    forward: float
    gradients: float
    weights: float


def tensor_groups(layout: Layout, ranks: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the ranks of each tensor group; the tensor axis varies fastest."""
    for start in range(0, layout.world, layout.tensor):
        yield ranks[start : start + layout.tensor]


def module_of(name: str) -> str:
    return name.rpartition(".")[0]
