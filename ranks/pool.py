"""Define ``run_parallel``: run a function on many ranks, in processes started once for all calls."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from ..parallel_state import check_local_ranks
from .failures import RankError, RankFailure, describe_exit, name_ranks
from .messages import Call, Leave, Raised, Ready, Returned
from .pickling import FunctionName, pack, unpack, unpack_exception
from .processes import Process, Rendezvous, gather_stacks, templates

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
            exchange = _Exchange(workers, timeout)
            try:
                results = exchange.answers()
            finally:
                self._replace(exchange.spoiled)
        return results

    def _start(self, world: int) -> None:
        """Start workers up to ``world``, ready for a call."""
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


class _Exchange:
    """Exchange one call's messages with the workers.

    ``spoiled`` are the workers that have not said ``Ready`` and cannot be used again.
    """

    def __init__(self, workers: list[Process], timeout: float) -> None:
        self.spoiled = list(workers)
        self._workers = workers
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._silent = dict(enumerate(workers))
        self._staying: list[Process] = []  # answered, and still in the process group
        self._results: dict[int, bytes] = {}
        self._failures: list[RankFailure] = []

    def answers(self) -> list[Any]:
        """Return the results by rank, or raise ``RankError``."""
        while self._silent and (seconds := self._deadline - time.monotonic()) > 0:
            for pipe in wait([worker.pipe for worker in self._silent.values()], seconds):
                self._hear(next(rank for rank, worker in self._silent.items() if worker.pipe is pipe))
                if self._failures:
                    # The others may wait for a rank that will not come: once it has left, its sockets are
                    # closed and their collectives break.
                    self._let_leave()
                    self._deadline = min(self._deadline, time.monotonic() + GRACE)
        headline = ""
        if self._silent and not self._failures:
            headline = f"{name_ranks(list(self._silent))} did not answer within {self._timeout:g} s"
        self._note_silent()
        self._let_leave()
        self._await_ready()
        if self._failures:
            error = RankError(self._failures, headline)
            raise error from error.cause
        for rank, worker in enumerate(self._workers):
            _pass_on(rank, worker.output())
        return [unpack(self._results[rank]) for rank in range(len(self._workers))]

    def _hear(self, rank: int) -> None:
        """Take a rank's answer, or its death."""
        worker = self._silent.pop(rank)
        try:
            answer = worker.receive()
        except EOFError:
            now, how = time.monotonic(), describe_exit(worker.end())
            self._failures.append(RankFailure(rank, "died", now, how, output=worker.output()))
            return
        self._staying.append(worker)
        if isinstance(answer, Returned):
            self._results[rank] = answer.result
            return
        assert isinstance(answer, Raised), answer
        said, cause = worker.output(), unpack_exception(answer.cause)
        summary = f"raised {answer.summary}"
        self._failures.append(
            RankFailure(rank, "raised", answer.seconds, summary, answer.traceback, said, cause)
        )

    def _note_silent(self) -> None:
        if not self._silent:
            return
        now = time.monotonic()
        for rank, said in gather_stacks(self._silent).items():
            self._failures.append(
                RankFailure(rank, "silent", now, "did not answer; it was here:", output=said)
            )

    def _let_leave(self) -> None:
        for worker in self._staying:
            worker.send(Leave())
        self._staying.clear()

    def _await_ready(self) -> None:
        """Note who has left the process group in good order.

        Nobody has where a rank is gone: if it went while gloo connected the ranks, the others can hang in
        their next group.
        """
        if any(failure.kind != "raised" for failure in self._failures):
            return
        deadline = time.monotonic() + GRACE
        for worker in self._workers:
            if worker.pipe.poll(max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(EOFError):
                    assert isinstance(worker.receive(), Ready)
                    self.spoiled.remove(worker)


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
