"""Describe the tokens that a module is given, from which its cost follows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from ..parallel_state import ParallelState


@dataclass(frozen=True, slots=True)
class Tokens:
    """Describe the tokens of one micro-batch on one rank, and how their numbers are held.

    ``rows`` of ``length`` tokens: this rank's piece over the context axis, whole over the tensor axis.
    ``hidden``: numbers of a token between the blocks. ``compute``: bytes of a number. ``fused``: whether
    norms, dropout and attention with dropout are one kernel each (CUDA) or several (a CPU). ``width``: how
    many numbers of a token a module is given, if it does not know; 0: ``hidden``. ``reached``: whether a
    backward comes to what a module is given, because something before it is trained.
    """

    rows: float
    length: float
    hidden: int
    compute: int = 4
    fused: bool = True
    width: int = 0
    reached: bool = True

    @property
    def count(self) -> float:
        return self.rows * self.length

    @property
    def inner(self) -> int:
        """Return the bytes of a number where layers compute in at least fp32."""
        return max(self.compute, 4)

    @property
    def mask(self) -> int:
        """Return the bytes of a number's mask in dropout."""
        return 1 if self.fused else self.compute

    def bytes(self, width: float) -> float:
        """Return the bytes of ``width`` numbers for each token."""
        return self.count * width * self.compute

    def times(self, number: float) -> Tokens:
        """Return ``number`` times as many rows, such as one row for each head or each expert of a token."""
        return replace(self, rows=self.rows * number)

    def after(self, *parts: nn.Module | nn.Parameter) -> Tokens:
        """Return the tokens that these modules, or products with these parameters, make: a backward comes to
        them if one of the parameters is trained.
        """
        if self.reached:
            return self
        every = ([one] if isinstance(one, nn.Parameter) else one.parameters() for one in parts)
        return replace(self, reached=any(one.requires_grad for some in every for one in some))

    def between_blocks(self, state: ParallelState) -> Tokens:
        """Return the tokens between the blocks, which sequence parallelism splits over the tensor ranks."""
        return replace(self, length=self.length / state.tensor_size) if state.sequence else self
