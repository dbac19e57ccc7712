"""Floor 5: how much memory a rank will need, from declarations and a layout; no tensor is made."""

from .activations import BlockShape, Kept, block_shape, kept_in_block
from .fit import Change, Fit, changes_that_fit
from .holdings import RankParameters, rank_parameters
from .memory import MemoryPlan, plan_memory
from .pipeline import (
    SCHEDULE_NAMES,
    ScheduleKind,
    ScheduleName,
    bubble,
    check_schedule,
    in_flight,
    schedule_kind,
)
from .work import Work

__all__ = [
    "BlockShape",
    "Change",
    "Fit",
    "Kept",
    "MemoryPlan",
    "RankParameters",
    "SCHEDULE_NAMES",
    "ScheduleKind",
    "ScheduleName",
    "Work",
    "block_shape",
    "bubble",
    "changes_that_fit",
    "check_schedule",
    "in_flight",
    "kept_in_block",
    "plan_memory",
    "rank_parameters",
    "schedule_kind",
]
