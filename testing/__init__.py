"""Floor 8: the public test harness.

Offers ``run_parallel``, a function on many local ranks; ``assert_layout_invariant``, which compares a module
of yours with one process; and ``LiveBytes``, the memory that tensors hold.
"""

from .invariance.check import LayoutVariance, assert_layout_invariant
from .live_bytes import LiveBytes
from .operators import Operators, collectives_of
from .ranks.failures import RankError, RankFailure
from .ranks.fresh import ExitCode, run_fresh
from .ranks.pool import run_parallel

__all__ = [
    "ExitCode",
    "LayoutVariance",
    "LiveBytes",
    "Operators",
    "RankError",
    "RankFailure",
    "assert_layout_invariant",
    "collectives_of",
    "run_fresh",
    "run_parallel",
]
