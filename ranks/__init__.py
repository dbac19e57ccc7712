"""Floor 2: functions that run on several local ranks, in processes of their own.

Offers ``run_parallel``, whose ranks are started once for all calls, and ``run_fresh``, whose ranks are new
and may be killed. ``RankError`` says which rank failed first, and where the others stood.
"""

from .failures import RankError, RankFailure
from .pool import ExitCode, run_fresh, run_parallel

__all__ = ["ExitCode", "RankError", "RankFailure", "run_fresh", "run_parallel"]
