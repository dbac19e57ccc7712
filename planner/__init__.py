"""Floor 8: a run computed without starting it: memory, traffic, seconds, and the search for a layout.

Offers ``plan_memory``, the bytes on one rank (parameters, gradients, moments, activations); ``step_traffic``,
the collectives of a rank in one step; and ``changes_that_fit``, changes of a recipe that make it fit.
``planner.search`` finds layouts, ``planner.time`` predicts seconds, ``planner.dry_run`` plans a recipe.
"""

from .communication import Traffic, step_traffic, traffic_of
from .memory import MemoryPlan, memory_of, plan_memory
from .rank_parameters import Group, RankParameters, rank_parameters
from .sampled_model import SampledModel, sampled
from .stage_costs import StageCost, stage_costs
from .step_shape import Work
from .suggestions import Change, Remedy, changes_that_fit

__all__ = [
    "Change",
    "Remedy",
    "MemoryPlan",
    "Group",
    "RankParameters",
    "SampledModel",
    "StageCost",
    "Traffic",
    "Work",
    "changes_that_fit",
    "memory_of",
    "plan_memory",
    "rank_parameters",
    "sampled",
    "stage_costs",
    "step_traffic",
    "traffic_of",
]
