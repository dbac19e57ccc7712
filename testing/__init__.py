"""Floor 9: what a user asserts about a model of his own, and the ranks to do it on.

Offers ``run_parallel`` and ``run_fresh`` (functions on local ranks), ``assert_layout_invariant`` and what it
is made of (``observe``, ``pieces``, ``assemble``, ``differences``), ``LiveBytes`` (memory of tensors), and
``Operators`` and ``collectives_of`` (what code asks of torch). Each is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..ranks import ExitCode, RankError, RankFailure, run_fresh, run_parallel
    from ..simulation.live_bytes import LiveBytes
    from .invariance.check import LayoutVariance, assert_layout_invariant
    from .layouts import assemble, differences, observe, pieces
    from .operators import Operators, collectives_of

__all__ = [
    "ExitCode",
    "LayoutVariance",
    "LiveBytes",
    "Operators",
    "RankError",
    "RankFailure",
    "assemble",
    "assert_layout_invariant",
    "collectives_of",
    "differences",
    "observe",
    "pieces",
    "run_fresh",
    "run_parallel",
]

#: The modules that are searched for a name; what is cheap to import comes first.
_MODULES = ("..ranks", ".operators", "..simulation.live_bytes", ".layouts", ".invariance.check")


def __getattr__(name: str) -> Any:
    for place in _MODULES if name in __all__ else ():
        if hasattr(module := import_module(place, __name__), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
