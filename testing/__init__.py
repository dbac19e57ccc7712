"""Floor 8: the public test harness.

Offers ``run_parallel``, which runs a function on several local ranks; ``assert_layout_invariant``, which
compares your module in a layout with the same module on one process; and ``LiveBytes``, which measures the
memory that tensors hold.
"""

from ..ranks.failures import RankError, RankFailure
from ..ranks.fresh import ExitCode, run_fresh
from ..ranks.pool import run_parallel
from .invariance.check import LayoutVariance, assert_layout_invariant
from .live_bytes import LiveBytes
from .operators import Operators, collectives_of

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
