"""Floor 4: an accelerator that is not there, one rank on it, and what a program holds and does.

Offers ``StepRecord``, what a rank's whole step did (``planner.search.Worker`` runs one in a process of its
own); ``simulated_rank``, a rank of any layout on such a device; ``SimulatedDevice``, which counts what a
piece of code asks of it; ``WAITS``, the one list of places at which the host waits for the device;
``LiveBytes``, which counts the bytes of live tensors; and ``MicroBatch``, whose sizes traces of a model's
pieces (``simulation.pieces``) and the FLOPs of a token (``simulation.model_flops``) take. Each is imported
when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .device import Mixed, SimulatedDevice
    from .ledger import StepRecord
    from .live_bytes import LiveBytes
    from .micro_batch import MicroBatch
    from .rank import simulated_rank
    from .waits import WAITS, Wait, Waits

__all__ = [
    "WAITS",
    "LiveBytes",
    "MicroBatch",
    "Mixed",
    "SimulatedDevice",
    "StepRecord",
    "Wait",
    "Waits",
    "simulated_rank",
]

_MODULES = (".live_bytes", ".micro_batch", ".ledger", ".device", ".rank", ".waits")


def __getattr__(name: str) -> Any:
    for place in _MODULES if name in __all__ else ():
        if hasattr(module := import_module(place, __name__), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
