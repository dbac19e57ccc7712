"""Floor 8: the search for the layout of a model on a machine, and what a search writes.

Offers ``read_request`` for what is asked, ``find_layouts`` for the answer, and ``Choice``, one layout of it;
``fit`` for a run's layout on the ranks that are left.
"""

from .choice import Choice
from .find import Found, find_layouts
from .ranks_left import fit
from .request import Request, read_request

__all__ = ["Choice", "Found", "Request", "find_layouts", "fit", "read_request"]
