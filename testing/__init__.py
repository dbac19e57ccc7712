"""Floor 8: the public test harness: ranks for tests, and checks that a module is the same in every layout."""

from .invariance.check import LayoutVariance, assert_layout_invariant
from .live_bytes import LiveBytes
from .ranks.failures import RankError, RankFailure
from .ranks.fresh import ExitCode, run_fresh
from .ranks.pool import run_parallel

__all__ = [
    "ExitCode",
    "LayoutVariance",
    "LiveBytes",
    "RankError",
    "RankFailure",
    "assert_layout_invariant",
    "run_fresh",
    "run_parallel",
]
