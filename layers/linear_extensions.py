"""Define the products of a linear layer: their parameters, adapters, and other arithmetics (float8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel_state import Constant, Initial, Uniform, local


@dataclass(frozen=True)
class OutputPart:
    """Hold the parameters of one of a layer's products.

    ``holder``: the module that has them; ``rows``: which rows of its weight this rank computes with, ``None``
    for all that it holds; ``here``: how many these are.
    """

    holder: nn.Module
    rows: slice | None
    here: int

    def weight(self, name: str = "weight") -> Tensor:
        """Return this rank's rows of ``weight``, or of LoRA's ``lora_B``."""
        weight = local(getattr(self.holder, name))
        return weight if self.rows is None else weight[self.rows]

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Return what this rank computes with."""
        return self.weight(), None if self.holder.bias is None else self.weight("bias")


class Adapter(Protocol):
    """Define an adapter of a linear layer (LoRA): it changes the layer's outputs."""

    def __call__(self, x: Tensor) -> list[tuple[int, Tensor]]:
        """Return the terms to add to the outputs, each with the output's number.

        ``x`` is the linear's input, after its first collective; the terms are added before its last one.
        """


class Products(Protocol):
    """Define the arithmetic of the products of a linear layer: ``products``, or float8."""

    def __call__(self, x: Tensor, weights_and_biases: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """Return ``x W^T + b`` for each weight and bias that this rank computes with."""


def products(x: Tensor, weights_and_biases: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """Return ``x W^T + b`` for each weight and bias, in the dtype of ``x``."""
    return [F.linear(x, weight, bias) for weight, bias in weights_and_biases]


def initial_of_bias(initial: Initial) -> Initial:
    """Return the first values of a linear's bias: uniform beside uniform weights, as in torch, else zeros."""
    return initial if isinstance(initial, Uniform) else Constant(0.0)
