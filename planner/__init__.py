"""Floor 5: what a rank will need, asked of modules on the meta device; nothing is started.

Offers ``plan_memory``, the bytes of one rank; ``step_traffic``, what it sends in a step; and
``changes_that_fit``, what to change where it does not fit.
"""

from .activations import Saved, saved_under
from .communication import Traffic, block_traffic, step_traffic
from .memory import MemoryPlan, plan_memory
from .rank_parameters import RankParameters, rank_parameters
from .stage_costs import StageCost, model_cost, stage_costs
from .step_shape import Work
from .suggestions import Change, Fit, changes_that_fit

__all__ = [
    "Change",
    "Fit",
    "MemoryPlan",
    "RankParameters",
    "Saved",
    "StageCost",
    "Traffic",
    "Work",
    "block_traffic",
    "changes_that_fit",
    "model_cost",
    "plan_memory",
    "rank_parameters",
    "saved_under",
    "stage_costs",
    "step_traffic",
]
