"""Floor 8: one rank's whole training step on an accelerator that is not there, and what it holds and does.

Offers ``Worker``, which runs the step of a rank of a recipe in a process of its own and returns its
``StepRecord``; ``simulated_rank``, a rank of any layout on such a device; ``SimulatedDevice``, which counts
what a piece of code asks of it; ``WAITS``, the one list of places at which the host waits for the device; and
``LiveBytes``, which counts the bytes of live tensors. Each is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .device import Mixed, SimulatedDevice, Wait, Waits
    from .live_bytes import LiveBytes
    from .rank import simulated_rank
    from .record import StepRecord
    from .waits import WAITS
    from .worker import Worker

__all__ = [
    "WAITS",
    "LiveBytes",
    "Mixed",
    "SimulatedDevice",
    "StepRecord",
    "Wait",
    "Waits",
    "Worker",
    "simulated_rank",
]

_MODULES = (".live_bytes", ".record", ".device", ".rank", ".waits", ".worker")


def __getattr__(name: str) -> Any:
    for place in _MODULES if name in __all__ else ():
        if hasattr(module := import_module(place, __name__), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
