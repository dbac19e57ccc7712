"""Refuse code of users that asks for numbers, which a trace has not: what it does may depend on them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..parallel_state.user_errors import PACKAGE, package_of

_REFUSED = [False]


class NumbersAsked(RuntimeError):
    """Report an operator whose result depends on numbers."""


@contextmanager
def numbers_refused() -> Iterator[None]:
    """Let ``refuse_numbers`` raise inside this context."""
    before, _REFUSED[0] = _REFUSED[0], True
    try:
        yield
    finally:
        _REFUSED[0] = before


def refuse_numbers(operator: str) -> None:
    """Raise ``NumbersAsked`` if code that is not this package's asks for what an operator reads."""
    frame: FrameType | None = sys._getframe(1)
    while _REFUSED[0] and frame is not None:
        if (package := package_of(frame)) not in ("torch", PACKAGE) or not _between(frame):
            if package != PACKAGE:
                raise NumbersAsked(f"{operator} asks for numbers")
            return
        frame = frame.f_back


def _between(frame: FrameType) -> bool:
    """Tell whether a frame stands between the code that asks and the operator: torch's, or a trace's."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith(("torch.", f"{PACKAGE}.simulation.")) or name == "torch"
