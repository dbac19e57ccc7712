"""Run command lines in forks of a warm process, and see how each ends, what it says and what it leaves."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trilith.cli.app import run
from trilith.cli.shared import parity
from trilith.planner.search import find
from trilith.ranks import pool, processes

from support import forked
from support.forked import waited_for_a_core
from support.forked_launch import fork_templates

#: Seconds after which a command counts as hanging, on a machine that others use; those of a refusal, also
#: after the work began; and those after which a command must have begun with its work.
HANGS, REFUSED_WITHIN, AT_WORK_WITHIN = 120.0, 5.0, 2.0
#: By which of Python's audit events a command's work begins, besides its first word on stdout; the search of
#: ``plan`` and what ``parity`` does first show in neither.
_WORKS = {"os.mkdir", "os.fork", "os.posix_spawn", "subprocess.Popen"}
#: The most bytes that a refused command may hold beyond those of the process before it.
MOST_MEMORY = 300 << 20
#: The exit code of a command that was interrupted.
INTERRUPTED, DIFFERS = 130, 1
#: The end of a command that has found a fault of the machine, which is in its table.
FOUND_FAULT = ("doctor", 3)

_NO_MARKS = str.maketrans("", "", ",-")


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Return mode and size of everything in a folder; a folder's own size is 0."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, 0 if path.is_dir() else path.lstat().st_size)
        for path in sorted(folder.rglob("*"))
    }


#: What a fork must not let go.
_OF_PARENT: list[Any] = []


class Trial(NamedTuple):
    """Describe a command line to run in a folder of its own, and the exit codes that it may have.

    ``says``: what its error says. ``names``: the error says one of these, in at most 400 characters.
    ``work``: seconds after which the command is interrupted, because it was not refused and works for long:
    it has made a folder, started a process, or printed something by then.
    """

    where: Path
    words: list[str]
    codes: set[int]
    says: str = ""
    names: Sequence[str] = ()
    work: float = 0.0


def check(
    trials: Sequence[Trial],
    limit: Callable[[], Any] = lambda: None,
    after: Callable[[], Any] = lambda: None,
    enter: Callable[[Path], Any] = os.chdir,
    within: float = REFUSED_WITHIN,
) -> list[int]:
    """Run command lines one after another in one fork, and look at the end of each; return the exit codes.

    A fork of this process is dear, so what needs no ``limit`` of its own shares one. A command that took long
    may have met a busy machine: they are run once more then. ``after`` is called in the fork at the end, and
    ``enter`` with the folder of each. ``within``: the seconds that a refusal may take, or the begin of
    the work of a command that works for long.
    """

    def work() -> int:
        os.environ.update(TOKENIZERS_PARALLELISM="false")
        # The ranks that this process has already started answer to its parent. Their sockets' numbers are
        # other files' here, which would be closed with these objects.
        _OF_PARENT.append((pool._pool, processes.templates._templates))
        pool._pool, processes.templates._templates = pool.Pool(), []
        fork_templates()
        printed = os.memfd_create("stdout")
        if any(trial.work for trial in trials):  # a limit of files' sizes would count for it, too
            os.dup2(printed, 1)
        works = _Works(printed)
        limit()
        for trial in trials:
            enter(trial.where)
            os.environ["TMPDIR"], tempfile.tempdir = str(trial.where / "tmp"), None
            began, used, held = time.monotonic() - waited_for_a_core(), computed(), memory_from_now()
            works.begin(trial.work)
            code = run(trial.words)
            signal.setitimer(signal.ITIMER_REAL, 0)
            seconds = max(computed() - used, time.monotonic() - waited_for_a_core() - began)
            seconds *= within / REFUSED_WITHIN if works.began() else 1.0
            print(
                f"\0{code} {seconds} {most_memory() - held if held else 0}\0",
                end="",
                file=sys.stderr,
                flush=True,
            )
        after()
        return 0

    for again in (True, False):
        ended = forked.run_forked(work, trials[0].where, limit=HANGS)
        parts = ended.err.split("\0")
        done = [(err, *end.split()) for err, end in zip(parts[::2], parts[1::2], strict=False)]
        assert len(done) == len(trials), f"hangs or dies: {trials[len(done)].words}\n{ended}"
        assert ended.code == 0 and not parts[-1], ended
        assert not ended.left_processes, [trial.words for trial in trials]
        for (err, code, _, held), trial in zip(done, trials, strict=True):
            _check_end(trial, int(code), err, int(held))
        late = [
            int(code) not in (0, 1) and float(took) >= within
            for trial, (_, code, took, _) in zip(trials, done, strict=True)
        ]
        slow = [(trial.words, end) for trial, end, is_late in zip(trials, done, late, strict=True) if is_late]
        if not slow:
            break
        assert again, slow
    return [int(code) for _, code, *_ in done]


def _check_end(trial: Trial, code: int, err: str, held: int) -> None:
    if code == INTERRUPTED and trial.work:
        return
    assert code in trial.codes, f"code {code} of: {trial.words}\n{err}"
    if code not in (0, DIFFERS) and (trial.words[0], code) != FOUND_FAULT:
        assert "Traceback" not in err, f"{trial.words}\n{err}"
        line = err[err.rfind("\nerror: ") + 1 :] if trial.names else err  # warnings may come before
        assert line.startswith("error: ") and line.count("\n") == 1, f"{trial.words}\n{err}"
        assert not line.startswith("error: unexpected: ") and trial.says in line, f"{trial.words}\n{err}"
        assert held <= MOST_MEMORY, f"{held >> 20} MiB: {trial.words}\n{err}"
        if trial.names:
            assert len(line) <= 400, f"{len(line)} characters: {trial.words}\n{err}"
            plain = line.lower().translate(_NO_MARKS)
            named = any(name.lower().translate(_NO_MARKS) in plain for name in trial.names)
            assert named, f"none of {trial.names}: {trial.words}\n{err}"


class _Works:
    """Interrupt a command that works, and know whether it has begun to."""

    def __init__(self, printed: int) -> None:
        self._printed, self._seen, self._until = printed, False, 0.0
        sys.addaudithook(self._hear)
        find.find_layouts = self._noted(find.find_layouts)
        parity.compare_with_transformers = self._noted(parity.compare_with_transformers)
        signal.signal(signal.SIGALRM, self._interrupt)

    def begin(self, work: float) -> None:
        """Interrupt the command that begins now once it has worked so long; never with 0."""
        os.ftruncate(self._printed, 0)
        self._seen, self._until = False, time.monotonic() + AT_WORK_WITHIN
        signal.setitimer(signal.ITIMER_REAL, work, work and 0.1)

    def began(self) -> bool:
        """Return whether it has begun with its work."""
        return self._seen or os.fstat(self._printed).st_size > 0

    def _hear(self, event: str, _: Any) -> None:
        self._seen |= event in _WORKS

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            self._seen = True
            return call(*arguments, **options)

        return noted

    def _interrupt(self, *_: Any) -> None:
        if self.began() or time.monotonic() > self._until:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt


def computed() -> float:
    """Return the seconds of processor time of this process and of its children."""
    return sum(os.times()[:4])


def memory_from_now() -> int:
    """Return the bytes that this process holds, and count its peak from now on; 0 if it may not."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return most_memory()


def most_memory() -> int:
    """Return the peak of the bytes that this process held, 0 if it may not know."""
    try:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
    except OSError:
        return 0
