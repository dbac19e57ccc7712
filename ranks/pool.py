"""Run a function on many ranks: ``run_parallel`` in the same processes, ``run_fresh`` in new ones."""

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, Self, cast

from ..system import check_local_ranks
from .failures import RankError, RankFailure, describe_exit, name_ranks
from .messages import LEAVE, READY, Call, FunctionName, Raised, pack, unpack, unpack_exception
from .processes import Process, Rendezvous, silent_ranks, templates

#: Seconds that the other ranks get to answer once one has failed, and that all get to leave their group.
GRACE = 3.0


class Pool:
    """Hold as many workers as the widest call so far; a call of ``world`` ranks uses the first ``world``."""

    def __init__(self) -> None:
        self._workers: dict[int, Process] = {}
        self._rendezvous: Rendezvous | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def run(self, fn: Callable[..., Any], world: int, args: tuple[Any, ...], timeout: float) -> list[Any]:
        """See ``run_parallel``."""
        if world < 1:
            raise ValueError(f"world: expected 1 rank or more, found {world}")
        check_local_ranks(world)
        function, arguments = FunctionName.of(fn), pack(args)
        with self._lock:
            self._start(world)
            assert self._rendezvous is not None
            port, prefix = self._rendezvous.port, f"call-{next(self._numbers)}"
            workers = [self._workers[rank] for rank in range(world)]
            for rank, worker in enumerate(workers):
                # A collective may wait longer than the call: the call's own report of a hang comes first.
                worker.send(Call(function, arguments, rank, world, port, prefix, timeout + GRACE + 10))
            members = [_Member(rank, worker) for rank, worker in enumerate(workers)]
            try:
                return _answers(members, timeout)
            finally:
                self._replace([member.worker for member in members if member.phase != "ready"])

    def _start(self, world: int) -> None:
        if self._rendezvous is None:
            self._rendezvous = Rendezvous()
        missing = [rank for rank in range(world) if rank not in self._workers]
        self._workers |= templates.start(missing, fresh=False)

    def _replace(self, spoiled: list[Process]) -> None:
        """End these; the next call starts others in their place."""
        for worker in spoiled:
            worker.kill()
        self._workers = {rank: worker for rank, worker in self._workers.items() if worker not in spoiled}

    def close(self) -> None:
        """End all workers. A forked child of the owner leaves them alone."""
        if os.getpid() == self._owner:
            self._replace(list(self._workers.values()))


@dataclass
class _Member:
    """Hold a rank of one call: working, answered but still in the process group, leaving it, or ready."""

    rank: int
    worker: Process
    phase: Literal["working", "answered", "leaving", "ready"] = "working"
    result: bytes = b""
    failure: RankFailure | None = None

    def hear(self) -> None:
        """Take the rank's answer, or its death."""
        try:
            answer = self.worker.receive()
        except EOFError:
            how, now = describe_exit(self.worker.end()), time.monotonic()
            self.failure = RankFailure(self.rank, "died", now, how, output=self.worker.output())
            self.phase = "leaving"
            return
        self.phase = "answered"
        if isinstance(answer, bytes):
            self.result = answer
        else:
            assert isinstance(answer, Raised), answer
            facts = (answer.seconds, f"raised {answer.summary}", answer.traceback, self.worker.output())
            self.failure = RankFailure(self.rank, "raised", *facts, unpack_exception(answer.cause))


def _answers(members: list[_Member], timeout: float) -> list[Any]:
    """Exchange one call's messages; return the results by rank, or raise ``RankError``."""
    deadline, headline = time.monotonic() + timeout, ""
    while (working := _in("working", members)) and (seconds := deadline - time.monotonic()) > 0:
        pipes = {member.worker.pipe: member for member in working}
        for pipe in wait([*pipes], seconds):
            pipes[cast(Connection, pipe)].hear()
        if _failures(members):
            # The others may wait for a rank that will not come: once it has left, its sockets are closed and
            # their collectives break.
            _let_leave(members)
            deadline = min(deadline, time.monotonic() + GRACE)
    if working and not _failures(members):
        headline = f"{name_ranks([member.rank for member in working])} did not answer within {timeout:g} s"
    still_there = {member.rank: member.worker for member in working}
    for failure in silent_ranks(still_there, "did not answer; it was here:"):
        members[failure.rank].failure = failure
    _let_leave(members)
    failures = _failures(members)
    # Nobody has left the process group in good order where a rank is gone: if it went while gloo connected
    # the ranks, the others can hang in their next group.
    if all(failure.kind == "raised" for failure in failures):
        _await_ready(members)
    if failures:
        error = RankError(failures, headline)
        raise error from error.cause
    for member in members:
        _pass_on(member.rank, member.worker.output())
    return [unpack(member.result) for member in members]


def _in(phase: str, members: list[_Member]) -> list[_Member]:
    return [member for member in members if member.phase == phase]


def _failures(members: list[_Member]) -> list[RankFailure]:
    return [member.failure for member in members if member.failure is not None]


def _let_leave(members: list[_Member]) -> None:
    for member in _in("answered", members):
        member.worker.send(LEAVE)
        member.phase = "leaving"


def _await_ready(members: list[_Member]) -> None:
    deadline = time.monotonic() + GRACE
    for member in members:
        if member.worker.pipe.poll(max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(EOFError):
                assert member.worker.receive() == READY
                member.phase = "ready"


def _pass_on(rank: int, text: str) -> None:
    for line in text.splitlines():
        sys.stderr.write(f"[rank {rank}] {line}\n")


# One pool for the whole process: that it outlives a call is its purpose.
_pool = Pool()
atexit.register(_pool.close)


def run_parallel(fn: Callable[..., Any], world: int = 4, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run ``fn(*args)`` on ``world`` ranks with an initialised gloo process group, and return the results by
    rank.

    ``fn`` is defined with ``def`` at the top of a module (a test module works too). Arguments and results are
    pickled, and tensors arrive as ordinary copies. The ranks are processes with one thread each; the first
    call starts them and later calls use them again. Every call finds a new process group, the default dtype
    and device, and seeds at zero. The ranks have the environment and working directory that this process had
    when they were started. Their output goes to this process's stderr.

    Raises ``RankError`` if a rank raises, dies, or has not answered after ``timeout`` seconds, and
    ``ValueError`` for a function that cannot be found by name.
    """
    return _pool.run(fn, world, args, timeout)


class ExitCode(int):
    """Hold a rank's exit code, negative for a signal that killed it; ``output``: all that it printed."""

    output: str

    def __new__(cls, code: int, output: str) -> Self:
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
