"""Define the adapters that a linear layer may carry, and other arithmetics of its products (float8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..parallel_state import Constant, Initial, Uniform


class Adapter(Protocol):
    """Define an adapter of a linear layer (LoRA): it changes the layer's outputs."""

    def __call__(self, x: Tensor) -> list[tuple[int, Tensor]]:
        """Return the terms to add to the outputs, each with the output's number.

        ``x`` is the linear's input, after its first collective; the terms are added before its last one.
        """


class Products(Protocol):
    """Define another arithmetic for the products of a linear layer (float8)."""

    def __call__(self, x: Tensor, held: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """Return ``x W^T + b`` for each weight and bias that this rank computes with."""


def initial_of_bias(initial: Initial) -> Initial:
    """Return the first values of a linear's bias: uniform beside uniform weights, as in torch, else zeros."""
    return initial if isinstance(initial, Uniform) else Constant(0.0)
