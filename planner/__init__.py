"""Floor 8: a run computed without starting it: memory, traffic, seconds, and the search for a layout.

Offers ``plan_memory``, the bytes on one rank (parameters, gradients, moments, activations); ``step_traffic``,
the collectives of a rank in one step; ``find_layouts``, the fastest layouts that fit a request
(``read_request``); ``fit``, the layout for the ranks that are left (``trilith train --fit``); and ``Worker``,
which runs the step of a rank of a recipe on a device that is not there and returns its ``StepRecord``.
``planner.time`` predicts seconds, ``planner.dry_run`` plans a recipe.
"""

from typing import TYPE_CHECKING, Any

from .communication import Traffic, step_traffic
from .memory import MemoryPlan, plan_memory
from .planned_model import rank_parameters
from .rank_parameters import Group, RankParameters
from .sampled_model import Asked, SampledModel, sampled
from .step_shape import Work

if TYPE_CHECKING:
    from .search import Choice, Found, Request, Worker, find_layouts, fit, read_request

__all__ = [
    "Asked",
    "Choice",
    "Found",
    "Group",
    "MemoryPlan",
    "RankParameters",
    "Request",
    "SampledModel",
    "Traffic",
    "Work",
    "Worker",
    "find_layouts",
    "fit",
    "plan_memory",
    "rank_parameters",
    "read_request",
    "sampled",
    "step_traffic",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import search  # when one of its names is first used

    return getattr(search, name)
