"""Floor 8: a run computed without starting it: memory, traffic, seconds, and the search for a layout.

Offers ``plan_memory``, the bytes on one rank (parameters, gradients, moments, activations); ``step_traffic``,
the collectives of a rank in one step; ``find_layouts``, the fastest layouts that fit a request
(``read_request``); ``fit``, the layout for the ranks that are left (``trilith train --fit``); and ``Worker``,
which runs the step of a rank of a recipe on a device that is not there and returns its ``StepRecord``. Each
is imported when it is first used. ``planner.time`` predicts seconds, ``planner.dry_run`` plans a recipe.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .communication import Traffic, step_traffic, traffic_of
    from .memory import MemoryPlan, memory_of, plan_memory
    from .rank_parameters import Group, RankParameters, rank_parameters
    from .sampled_model import SampledModel, sampled
    from .search import Choice, Found, Request, Worker, find_layouts, fit, read_request
    from .stage_costs import StageCost, stage_costs
    from .step_shape import Work

__all__ = [
    "Choice",
    "Found",
    "Group",
    "MemoryPlan",
    "RankParameters",
    "Request",
    "SampledModel",
    "StageCost",
    "Traffic",
    "Work",
    "Worker",
    "find_layouts",
    "fit",
    "memory_of",
    "plan_memory",
    "rank_parameters",
    "read_request",
    "sampled",
    "stage_costs",
    "step_traffic",
    "traffic_of",
]

#: What has the names; a later one imports the earlier ones anyway.
_MODULES = (
    *(".step_shape", ".rank_parameters", ".stage_costs", ".sampled_model", ".memory", ".communication"),
    ".search",
)


def __getattr__(name: str) -> Any:
    for place in _MODULES if name in __all__ else ():
        if hasattr(module := import_module(place, __name__), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
