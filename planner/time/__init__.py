"""Predict the seconds of a step on a machine, part by part, in any layout, without starting anything.

Offers ``Machine``, by its name (``machine_named``) or from measurements (``machine_from_bench``);
and ``StepTimer``, which times one step.
"""

from .machines import MACHINES as MACHINES
from .machines import Machine as Machine
from .machines import machine_named as machine_named
from .measured import machine_from_bench as machine_from_bench
from .prediction import MIDDLE_HALF as MIDDLE_HALF
from .prediction import PARTS as PARTS
from .prediction import TIMES_SLOWER as TIMES_SLOWER
from .prediction import StepTime as StepTime
from .step_time import StepTimer as StepTimer
