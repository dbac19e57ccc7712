"""Floor 0: the operating system; imports no torch.

Offers ``refusal_of``, which says in plain words what the system refused, ``bounded`` work within a limit of
memory and time, ``visible``, which makes text fit for a terminal, and ``quiet_libraries``.
"""

from .enough import check_enough
from .limits import OverLimit, bounded, most_at_once
from .quiet import quiet_libraries
from .refusals import Refusal, refusal_of
from .visible import visible

__all__ = [
    "OverLimit",
    "Refusal",
    "bounded",
    "check_enough",
    "most_at_once",
    "quiet_libraries",
    "refusal_of",
    "visible",
]
