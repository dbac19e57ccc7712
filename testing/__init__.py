"""The public test harness: functions on many ranks, through a pool of workers that is reused."""

from .failures import RankError, RankFailure
from .fresh import ExitCode, run_fresh
from .live_bytes import LiveBytes
from .pool import run_parallel

__all__ = ["ExitCode", "LiveBytes", "RankError", "RankFailure", "run_fresh", "run_parallel"]
