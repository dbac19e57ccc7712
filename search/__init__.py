"""Floor 8: the search for the layout of a model on a machine, and what a search writes.

Offers ``read_request``, which describes the model, the machine and the batch; ``find_layouts``, which returns
the fastest layouts that fit; ``Choice``, one such layout; and ``fit``, which chooses a run's layout for the
ranks that are left (``trilith train --fit``).
"""

from .choice import Choice
from .find import Found, find_layouts
from .ranks_left import fit
from .request import Request, read_request

__all__ = ["Choice", "Found", "Request", "find_layouts", "fit", "read_request"]
