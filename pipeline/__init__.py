"""Floor 4: pipeline parallelism: schedules, their timetables, and the stages that run them.

Offers the schedules (GPipe, 1F1B, interleaved 1F1B, zero-bubble) by name with ``schedule_kind`` and
``check_schedule``; ``bubble``, the idle share of a schedule; ``timetable``, the actions of every rank in
order; and ``Stages``, a model that runs over its stages, with or without a backward.
"""

from .schedule_actions import Action
from .schedule_kinds import (
    SCHEDULE_NAMES,
    ScheduleKind,
    ScheduleName,
    bubble,
    bubble_share,
    check_recomputation,
    check_schedule,
    micro_batches_for,
    schedule_kind,
)
from .stages import Stages
from .timetable import Timed, Timetable, layout_of, timetable
