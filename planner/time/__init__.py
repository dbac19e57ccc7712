"""Inside the planner: how long a step takes on a machine, by part, in any layout, without starting anything.

Offers ``Machine`` and the table of them (``machine_named``), and ``step_time``, with ``spending`` for a run.
"""

from .machines import MACHINES, Efficiency, Link, Machine, machine_named
from .prediction import PARTS, Spending, StepTime, spending
from .step_time import StepTimer, step_time

__all__ = [
    "MACHINES",
    "PARTS",
    "Efficiency",
    "Link",
    "Machine",
    "Spending",
    "StepTime",
    "StepTimer",
    "machine_named",
    "spending",
    "step_time",
]
