"""Search for the layout of a model on a machine, and write what a search finds.

Offers ``read_request``, which describes the model, the machine and the batch; ``find_layouts``, which returns
the fastest layouts that fit; ``Choice``, one such layout; ``fit``, which chooses a run's layout for the
ranks that are left (``trilith train --fit``); and ``Worker``, which runs the step of a rank of a recipe on a
device that is not there and returns its ``StepRecord``.
"""

from .choice import Choice
from .chosen_recipes import fit
from .find import Found, find_layouts
from .request import Request, read_request
from .simulation_worker import Worker

__all__ = ["Choice", "Found", "Request", "Worker", "find_layouts", "fit", "read_request"]
