"""Define a measurement to make and the line of the report that it becomes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: done: measured. passed, differs: compared with a bound. failed: no result. left out: not tried.
Status = Literal["done", "passed", "differs", "failed", "left out"]

#: A figure is a number with its unit in its name ("tokens/s"), or a word; ``None`` if it is not finite.
Figures = dict[str, float | str | None]


@dataclass(frozen=True)
class Row:
    """Hold one line of the report. ``note`` says why, or under which conditions; ``output`` is all that the
    processes of a failed measurement printed.
    """

    part: str
    what: str
    status: Status
    figures: Figures = field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0
    output: str = ""


@dataclass(frozen=True)
class Case:
    """State one measurement: ``work(**options)`` on ``world`` new processes, ended after ``seconds``.

    ``work`` returns ``figures``, and may return ``status`` and ``note``; it stands at the top of a module.
    ``note`` is what the report says besides. A case without ``work`` is left out, for the reason in ``note``.
    """

    part: str
    what: str
    work: Callable[..., dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    world: int = 1
    seconds: float = 120.0
    note: str = ""
