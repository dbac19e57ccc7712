"""Floor 0: the operating system; imports no torch.

Offers ``refusal_of``, which says in plain words what the system refused, ``bounded`` work within a limit of
memory and time, ``visible``, which makes text fit for a terminal, ``counted``, which writes a number of
things, ``whole_number``, which reads a number that somebody else wrote, ``quiet_libraries``, and four ways to
search less for garbage: in starts, in plans, in training (``manual_gc``) and in tests. ``errors``
has the errors for users, one line each.
"""

from .garbage import manual_gc, no_garbage_search, search_garbage_rarely, search_less_often
from .limits import OverLimit, bounded, check_enough, most_at_once
from .refusals import Refusal, refusal_of
from .standard_streams import quiet_libraries
from .text import counted, visible, whole_number
