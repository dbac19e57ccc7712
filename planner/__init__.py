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
    schedule_kind,
)
from .timetable import Action, Held, Timed, Timetable, held_at_once, layout_of, timetable
from .work import Work

__all__ = [
    "Action",
    "BlockShape",
    "Change",
    "Fit",
    "Held",
    "Kept",
    "MemoryPlan",
    "RankParameters",
    "SCHEDULE_NAMES",
    "ScheduleKind",
    "ScheduleName",
    "Timed",
    "Timetable",
    "Work",
    "block_shape",
    "bubble",
    "changes_that_fit",
    "check_schedule",
    "held_at_once",
    "kept_in_block",
    "layout_of",
    "plan_memory",
    "rank_parameters",
    "schedule_kind",
    "timetable",
]
