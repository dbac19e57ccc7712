"""Floor 5: what a rank will need, asked of modules on the meta device; nothing is started.

Offers ``plan_memory``, the bytes of one rank; ``step_traffic``, what it sends in a step; and
``changes_that_fit``, what to change where it does not fit.
"""

from .activations import Saved, saved_under
from .communication import Traffic, block_traffic, step_traffic, traffic_of
from .memory import MemoryPlan, memory_of, plan_memory
from .rank_parameters import RankParameters, rank_parameters
from .sampled import SampledModel, sampled
from .stage_costs import StageCost, model_cost, stage_costs
from .step_shape import Work
from .suggestions import Change, Fit, changes_that_fit

__all__ = [
    "Change",
    "Fit",
    "MemoryPlan",
    "RankParameters",
    "SampledModel",
    "Saved",
    "StageCost",
    "Traffic",
    "Work",
    "block_traffic",
    "changes_that_fit",
    "model_cost",
    "memory_of",
    "plan_memory",
    "rank_parameters",
    "sampled",
    "saved_under",
    "stage_costs",
    "step_traffic",
    "traffic_of",
]
