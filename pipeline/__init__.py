"""Floor 4: pipeline parallelism: schedules, their timetables, and the stages that run them.

Offers the schedules (GPipe, 1F1B, interleaved 1F1B, zero-bubble) by name with ``schedule_kind`` and
``check_schedule``; ``bubble``, the idle share of a schedule; ``timetable``, the actions of every rank in
order; and ``Stages``, a model that runs over its stages, with or without a backward.
"""

from .schedule_actions import Action as Action
from .schedule_kinds import SCHEDULE_NAMES as SCHEDULE_NAMES
from .schedule_kinds import ScheduleKind as ScheduleKind
from .schedule_kinds import ScheduleName as ScheduleName
from .schedule_kinds import bubble as bubble
from .schedule_kinds import check_recomputation as check_recomputation
from .schedule_kinds import check_schedule as check_schedule
from .schedule_kinds import schedule_kind as schedule_kind
from .stages import Stages as Stages
from .stages import evaluating as evaluating
from .timetable import Timed as Timed
from .timetable import Timetable as Timetable
from .timetable import layout_of as layout_of
from .timetable import timetable as timetable
