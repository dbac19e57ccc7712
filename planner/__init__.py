"""Floor 5: what a rank will need, from declarations and a layout alone; nothing is started.

Offers ``plan_memory``, the bytes of one rank; ``step_traffic``, what it sends in a step; and
``changes_that_fit``, what to change where it does not fit.
"""

from .activations import BlockShape, Kept, block_shape, kept_in_block
from .communication import Traffic, block_traffic, step_traffic
from .memory import MemoryPlan, plan_memory
from .rank_parameters import RankParameters, rank_parameters
from .step_shape import Work
from .suggestions import Change, Fit, changes_that_fit

__all__ = [
    "BlockShape",
    "Change",
    "Fit",
    "Kept",
    "MemoryPlan",
    "RankParameters",
    "Traffic",
    "Work",
    "block_shape",
    "block_traffic",
    "changes_that_fit",
    "kept_in_block",
    "plan_memory",
    "rank_parameters",
    "step_traffic",
]
