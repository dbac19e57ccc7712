"""Floor 5: the memory that a rank will need and what it sends, from declarations and a layout alone."""

from .activations import BlockShape, Kept, block_shape, kept_in_block
from .communication import Traffic, block_traffic, step_traffic
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
    "Traffic",
    "Work",
    "block_shape",
    "block_traffic",
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
    "step_traffic",
]
