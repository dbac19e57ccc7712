"""Floor 0: the operating system; imports no torch.

Offers ``refusal_of``, which says in plain words what the system refused, ``bounded`` work within a limit of
memory and time, ``visible``, which makes text fit for a terminal, ``counted``, which writes a number of
things, ``literal``, which writes a value as a recipe has it, ``nearest_names``, which hints at what was
meant, ``format_warning``, ``whole_number``, which reads a number that somebody else wrote, ``address_of``,
``usable_cores``, ``quiet_libraries``, and four ways to search less for garbage: in starts, in plans, in
training, by ``manual_gc``, and in tests.
``check_local_ranks`` and ``check_workers`` refuse too many processes. ``errors`` has the errors for users,
one line each, ``BadInput`` among them.
"""

from .addresses import address_of as address_of
from .errors import BadInput as BadInput
from .errors import require as require
from .garbage import manual_gc as manual_gc
from .garbage import no_garbage_search as no_garbage_search
from .garbage import search_garbage_rarely as search_garbage_rarely
from .garbage import search_less_often as search_less_often
from .limits import OverLimit as OverLimit
from .limits import bounded as bounded
from .limits import check_enough as check_enough
from .limits import check_local_ranks as check_local_ranks
from .limits import check_workers as check_workers
from .limits import most_at_once as most_at_once
from .machine import usable_cores as usable_cores
from .refusals import Refusal as Refusal
from .refusals import refusal_of as refusal_of
from .standard_streams import quiet_libraries as quiet_libraries
from .text import counted as counted
from .text import format_warning as format_warning
from .text import literal as literal
from .text import nearest_names as nearest_names
from .text import visible as visible
from .text import whole_number as whole_number
