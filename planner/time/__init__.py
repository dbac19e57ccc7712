"""Inside the planner: how long a step takes on a machine, by part, in any layout, without starting anything.

Offers ``Machine``, by name (``machine_named``) or as measured (``machine_from_bench``), and ``step_time``,
with ``spending`` for a run.
"""

from .machines import MACHINES, Efficiency, Link, Machine, machine_named
from .measured import machine_from_bench
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
    "machine_from_bench",
    "machine_named",
    "spending",
    "step_time",
]
