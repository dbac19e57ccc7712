"""Kill work at named points and at random moments, and see what is left of it.

``killed_runs``: a fault on a rank, the exit codes, the checkpoints that are whole, and the run whole again.
``killed_work``: work with one output, which is absent or whole at each point, and which the same call
completes. ``Campaign``: processes that are killed at moments of its own choice.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from trilith.checkpoints import read_source
from trilith.parallel_state import BadInput
from trilith.ranks import ExitCode, run_fresh
from trilith.system.process_info import ProcessInfo, children_of, process_info

from support.folders import contents
from support.refusals import cases, rows_of


def wait_for(
    condition: Callable[[], object],
    seconds: float = 60,
    what: str = "what was waited for",
    *,
    ended: Future[list[ExitCode]] | None = None,
) -> None:
    """Wait until the condition holds; fail after so many seconds, or as soon as processes have ``ended``.

    To look takes at most a tenth of the time, which a condition that reads files would else take from them.
    """
    deadline = time.monotonic() + seconds
    while not (looked := _timed(condition))[0]:
        if ended is not None and ended.done() and not condition():
            pytest.fail(f"ended before {what}: {[code.output for code in ended.result()]}")
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(max(0.01, 9 * looked[1]))


def _timed(condition: Callable[[], object]) -> tuple[object, float]:
    """Return what the condition says, and the seconds of processor time that it took."""
    began = time.thread_time()
    return condition(), time.thread_time() - began


def free_port() -> int:
    """Return a port that nothing used a moment ago."""
    with socket.socket() as holder:
        holder.bind(("", 0))
        return int(holder.getsockname()[1])


@dataclass(frozen=True)
class Kill:
    """State a fault on a rank of a run of two, how both ranks end, and which checkpoints are whole then.

    ``says``: what ranks that did not end with 0 say, both the same line if it is the same. ``cause``:
    the rank that failed by itself. ``then``: the checkpoints after the same command without the fault.
    """

    why: str
    fault: str
    codes: tuple[int, int]
    saved: Sequence[int]
    then: Sequence[int] = ()
    says: tuple[str, str] = ("", "")
    cause: int | None = None
    changes: Sequence[str] = ()
    steps: int = 6
    slow: bool = False


def killed_runs(*kills: Kill | Iterable[Kill]) -> Any:
    """Return one test with a case for each kill; its module has ``make``, which makes runs of two ranks."""

    @pytest.mark.parametrize("kill", cases(kills))
    def test(kill: Kill, make: Callable[[int], Any]) -> None:
        run = make(kill.steps)
        codes = run.ranks(*kill.changes, fault=kill.fault)
        assert tuple(codes) == kill.codes, [code.output for code in codes]
        for rank, (code, says) in enumerate(zip(codes, kill.says, strict=True)):
            assert says in code.output and (code != 3 or says in str(run.status(rank)["error"]))
        if kill.says[0] == kill.says[1] != "":
            assert codes[0].output == codes[1].output and run.status(0)["error"] == run.status(1)["error"]
        if kill.cause is not None:
            assert [run.status(rank)["cause"] for rank in (0, 1)] == [rank == kill.cause for rank in (0, 1)]
        assert run.steps_saved == kill.saved  # reads every byte
        if kill.then:
            again = run.ranks(*kill.changes)
            assert again == [0, 0], [code.output for code in again]
            assert run.steps_saved == kill.then
        if kill.then or -signal.SIGKILL not in kill.codes:  # a kill leaves its part until the next start
            assert not [*run.out.glob("checkpoints/*.tmp-*")]

    return test


@dataclass(frozen=True)
class Work:
    """State work with one output: a function for ranks, of a source, an output, and ``arguments``.

    ``source``: a path in the folder that the fixture ``sources`` makes. The work is killed at each of
    ``points``, in the default suite only at those of ``quick``; ``why`` and the point are the test's id.
    """

    why: str
    source: str
    work: Callable[[str, str, Any], object]
    arguments: Any
    points: Sequence[str]
    quick: Sequence[str] = ()


#: By the work and its source: the output of a call that nobody killed.
_wholes: dict[tuple[str, Path], Path] = {}


def kill_at(point: str, work: Callable[..., object], *given: object) -> None:
    """Do the work in a process that is killed at the point."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRILITH_FAULT", f"rank=0;at={point};act=kill")
        (code,) = run_fresh(work, 1, *given, process_group=False)
    assert code == -signal.SIGKILL, code.output


def killed_work(*works: Work | Iterable[Work]) -> Any:
    """Return one test with a case for each work and point; its module has the fixture ``sources``."""
    rows = [(work, point) for work in rows_of(works) for point in work.points]
    slow = [pytest.mark.slow]
    named = [
        pytest.param((work, at), id=f"{work.why}-{at}", marks=slow * (at not in work.quick))
        for work, at in rows
    ]
    assert len({case.id for case in named}) == len(named), "two rows have the same name"

    @pytest.mark.parametrize("killed", named)
    def test(
        killed: tuple[Work, str], sources: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        work, point = killed
        source, out, key = sources / work.source, tmp_path / "out", (work.why, sources)
        if key not in _wholes:
            _wholes[key] = tmp_path_factory.mktemp("whole") / "out"
            work.work(str(source), str(_wholes[key]), work.arguments)
        before = contents(source)
        kill_at(point, work.work, str(source), str(out), work.arguments)
        assert out.exists() == (point == "commit.after_rename")
        if not out.exists():
            journal = [*tmp_path.glob("out.tmp-*/journal.jsonl")]
            assert len(journal) == ("noted" in point or "after_data" in point)
            says = r"found what a killed command left in out\.tmp-[0-9a-f]{16}, 20.*\. Run the same command"
            with pytest.raises(BadInput, match=says):
                read_source(out)
            work.work(str(source), str(out), work.arguments)
        assert contents(out) == contents(_wholes[key])
        assert contents(source) == before
        assert {path.name for path in tmp_path.iterdir()} - {"out.tmp-lock"} == {"out"}

    return test


def below(pid: int) -> set[int]:
    """Return the live processes that a process started, and those that these started."""
    numbers = {child.pid for child in children_of(pid) if child.alive}
    return numbers.union(*(below(number) for number in numbers))


class Campaign:
    """Kill processes at moments of its own choice, and tell which of them still live."""

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)

    @staticmethod
    def noted(path: Path) -> int:
        """Return the process id in a file; 0 until it is there."""
        return int((path.read_text() if path.exists() else "") or 0)

    @staticmethod
    def lives(process: ProcessInfo) -> bool:
        """Tell whether this very process lives, and not a later one with its number."""
        now = process_info(process.pid)
        return now is not None and now.alive and now.started == process.started

    @staticmethod
    def stands(pid: int) -> bool:
        """Tell whether the process has stopped itself at its point."""
        info = process_info(pid)
        return info is not None and info.state == "T"

    @staticmethod
    def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
        """Send the signal to those of the processes that are still there."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
