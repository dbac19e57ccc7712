"""Predict the seconds of a step on a machine, part by part, in any layout, without starting anything.

Offers ``Machine``, by its name (``machine_named``) or from measurements (``machine_from_bench``);
``StepTimer``, which times one step; and ``spending``, the days, GPU-hours and energy of a whole run.
"""

from .machines import MACHINES, Efficiency, Link, Machine, machine_named
from .measured import machine_from_bench
from .prediction import MIDDLE_HALF, PARTS, TIMES_SLOWER, Spending, StepTime, spending
from .step_time import StepTimer

__all__ = [
    "MACHINES",
    "MIDDLE_HALF",
    "PARTS",
    "TIMES_SLOWER",
    "Efficiency",
    "Link",
    "Machine",
    "Spending",
    "StepTime",
    "StepTimer",
    "machine_from_bench",
    "machine_named",
    "spending",
]
