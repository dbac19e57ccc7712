"""Hold the traces of one piece of a stage: a block, what is beside the blocks, or the loss."""

from collections.abc import Callable
from functools import cached_property
from typing import Literal

from ..layers import Checkpointing
from .record import Collective
from .trace import Trace

#: Whether a backward has two parts; and, if more pieces follow, both are noted.
InTwo = bool | Literal["followed"]


class Piece:
    """Hold what one piece of a stage does for a micro-batch, in each mode; ``what``: what it sends, in words;
    ``silent``: it only keeps something, the same in every mode, and sends nothing.

    See ``Trace`` for the bytes.
    """

    def __init__(
        self, take: Callable[[Checkpointing, InTwo], Trace], *, what: str = "", silent: bool = False
    ) -> None:
        self._take, self.what, self._silent = take, what, silent
        self._known: dict[tuple[Checkpointing, InTwo], Trace] = {}

    def under(self, mode: Checkpointing, *, in_two: InTwo = False) -> Trace:
        """Return the trace in a mode of activation checkpointing; ``in_two``: of a backward in two parts."""
        if self._silent:
            mode, in_two = "none", False
        key = "full" if mode == "every" else mode, in_two
        if key not in self._known:
            self._known[key] = self._take(*key)
        return self._known[key]

    @cached_property
    def plain(self) -> Trace:
        """Return the trace without activation checkpointing."""
        return self.under("none")

    @property
    def in_two(self) -> Trace:
        """Return the trace with a backward in two parts."""
        return self.under("none", in_two=True)

    @property
    def second_part(self) -> Trace:
        """Return the trace with the second part of a backward in two, where other pieces follow."""
        return self.under("none", in_two="followed")

    def sends(self, mode: Checkpointing = "none", *, again: bool = False) -> tuple[Collective, ...]:
        """Return the collectives of forward and backward, or those that a backward computes ``again``."""
        if self._silent:
            return ()
        return tuple(sent for sent in self.under(mode).collectives if (sent.phase == "again") == again)
