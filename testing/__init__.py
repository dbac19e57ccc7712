"""The public test harness: functions on many ranks, and whether a module is the same in every layout."""

from .failures import RankError, RankFailure
from .fresh import ExitCode, run_fresh
from .invariance import LayoutVariance, assert_layout_invariant
from .live_bytes import LiveBytes
from .pool import run_parallel

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
