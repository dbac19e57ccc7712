"""Define ``run_fresh``: run a function on ranks of its own, for tests in which ranks die."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..parallel_state import check_local_ranks
from .failures import RankError, RankFailure, describe_exit, name_ranks
from .messages import Call
from .pickling import FunctionName, pack
from .processes import Rendezvous, silent_ranks, templates


class ExitCode(int):
    """Hold the exit code of a rank, negative for the signal that killed it; ``output`` is all that it
    printed.
    """

    output: str

    def __new__(cls, code: int, output: str) -> ExitCode:
        self = super().__new__(cls, code)
        self.output = output
        return self


def run_fresh(
    fn: Callable[..., Any], world: int = 2, *args: Any, timeout: float = 60.0, process_group: bool = True
) -> list[ExitCode]:
    """Run ``fn(*args)`` on ``world`` new processes, wait for all of them to end, and return their exit codes
    by rank.

    A rank ends with 0 when ``fn`` returns, with the code of ``sys.exit``, with an exception's ``exit_code``,
    or with 1 and a traceback. With ``process_group=False`` none is started, and ``init_process_group()``
    works as under torchrun, with a store that outlives rank 0. Raises ``RankError``, naming the ranks, if
    some still run ``timeout`` seconds after all ranks had started.
    """
    if world < 1:
        raise ValueError(f"world: expected 1 rank or more, found {world}")
    check_local_ranks(world)
    function, arguments, rendezvous = FunctionName.of(fn), pack(args), Rendezvous()
    ranks = list(templates.start(range(world), fresh=True).values())
    try:
        for rank, process in enumerate(ranks):
            call = Call(function, arguments, rank, world, rendezvous.port, "fresh", timeout, process_group)
            process.send(call)
        deadline = time.monotonic() + timeout
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in ranks]
        running = {rank: process for rank, process in enumerate(ranks) if codes[rank] is None}
        if running:
            headline = f"{name_ranks(list(running))} did not end within {timeout:g} s"
            failures = silent_ranks(running, "still ran; it was here:")
            for rank, code in enumerate(codes):
                if code:  # why the others still wait
                    died = RankFailure(
                        rank, "died", deadline, describe_exit(code), output=ranks[rank].output()
                    )
                    failures.append(died)
            raise RankError(failures, headline)
        return [ExitCode(process.end(), process.output()) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
