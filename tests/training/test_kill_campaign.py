"""Starts of ``trilith train`` killed at random moments: ranks or the launcher; some race each other.

Whole starts, process for process as a user's: launcher, ranks under it, with their sessions, environments and
standard inputs. Only, each is a fork of its parent and not a new interpreter,
which would import torch for seconds: so there are a hundred kills where there would be ten.
"""

import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from support.forked_launch import launch_forked
from support.kills import Campaign, wait_for
from trilith.cli.app import run
from trilith.runs.events import read_events
from trilith.runs.metrics import read_metrics
from trilith.system.process_info import children_of
from trilith.testing import run_fresh

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
ONE_RANK = ["layout.data=1", "layout.zero=0"]
#: Whom to kill of a start, by its launcher and its ranks.
VICTIMS = {
    "launcher": lambda launcher, ranks: [launcher],
    "rank 0": lambda launcher, ranks: ranks[:1],
    "rank 1": lambda launcher, ranks: ranks[1:],
    "launcher and rank 1": lambda launcher, ranks: [launcher, *ranks[1:]],
    "all ranks": lambda launcher, ranks: ranks,
}


def start(arguments, folder):
    with mock.patch("trilith.runs.lock._PATIENCE", 3.0):
        launch_forked(run, ["train", *arguments], folder)


def holders(lock):
    """Return the processes to which a launcher passed this lock, as standard input."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(path / "fd" / "0") == str(lock):
                found.append(int(path.name))
    return found


class Starts(Campaign):
    """Kill starts in one run's folder, and check the rules after each kill."""

    def __init__(self, run, folder, seed):
        super().__init__(seed)
        self.run, self.folder = run, folder
        self.committed, self.count = 0, Counter()

    def kill_one(self):
        """Start one command, or two that race, and kill at a random moment."""
        random = self.random
        racing, one_rank = random.random() < 0.3, random.random() < 0.25
        # One of two racing starts may live; a single one must end by its kill, not because it has finished.
        until = self.committed + (12 if racing else 5000)
        background = random.choice(["true", "false"])
        changes = ["checkpoint.every=1", "checkpoint.keep=2", f"checkpoint.background={background}"]
        changes += ["timeout=15", f"stop_after={until}", *(ONE_RANK if one_rank else [])]
        for old in self.folder.glob("launcher-*"):
            old.unlink()
        starts = 2 if racing else 1
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(self._start, starts, changes)
            launchers = [self._pid_of(number) for number in range(starts)]
            steps = self._steps()
            if random.random() < 0.7:  # while it trains; else while it starts
                awaited = steps + random.randrange(8)
                with suppress(AssertionError):  # where it is slow, it is killed earlier
                    wait_for(lambda: ended.done() or self._steps() > awaited, 20)
            time.sleep(random.random() * 0.6)
            victim, launcher = random.choice([*VICTIMS]), random.choice(launchers)
            ranks = [child.pid for child in children_of(launcher)]
            self.kill(VICTIMS[victim](launcher, ranks) or [launcher])  # if it has no ranks yet, the launcher
            codes = ended.result()
        self.count.update(["kills", victim], races=racing)
        self._check(codes, f"{victim} of {starts}: {[(int(code), code.output) for code in codes]}")

    def _steps(self):
        return len(read_metrics(self.run.out / "metrics.jsonl"))

    def _start(self, starts, changes):
        arguments = [str(self.run.recipe), "--quiet", *changes]
        return run_fresh(start, starts, arguments, str(self.folder), process_group=False, timeout=100)

    def _pid_of(self, number):
        path = self.folder / f"launcher-{number}"
        wait_for(lambda: self.noted(path), what="a launcher started")
        return self.noted(path)

    def _check(self, codes, what):
        allowed = {-signal.SIGKILL, 0, 3, 75} | ({2} if len(codes) > 1 else set())
        assert {*codes} <= allowed, what
        lock = self.run.out / "run.lock"
        wait_for(lambda: not holders(lock), what=f"no process had the lock: {what}")
        saved = self.run.steps_saved  # reads every byte
        said = [one["step"] for one in read_events(self.run.out / "events.jsonl") if one["event"] == "saved"]
        newest = saved[-1] if saved else 0
        assert newest >= max([self.committed, *said[-1:]]), (saved, self.committed, said[-1:], what)
        self.committed = newest

    def finish(self):
        """Let a start that nobody kills continue; check that only a run's own files are left."""
        until = self.committed + 2
        (code,) = self._start(1, ["checkpoint.keep=2", "checkpoint.every=1", f"stop_after={until}"])
        assert code == 0, code.output
        self._check([code], "the last start")
        assert [line["step"] for line in read_metrics(self.run.out / "metrics.jsonl")] == [*range(until)]
        names = {"run.lock", "metrics.jsonl", "events.jsonl", "status", "checkpoints"}
        assert {path.name for path in self.run.out.iterdir()} == names
        assert {path.name for path in (self.run.out / "status").iterdir()} == {"rank0.json", "rank1.json"}
        steps = {f"step-{step:08d}" for step in (until - 1, until)}
        assert {path.name for path in (self.run.out / "checkpoints").iterdir()} == steps


@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(
    ("kills", "seed"), [(2, 0), *(pytest.param(50, seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_starts_killed_at_random_moments_lose_nothing_and_leave_nothing_K19(make, tmp_path, kills, seed):
    campaign = Starts(make(100_000), tmp_path, seed)
    while campaign.count["kills"] < kills:
        campaign.kill_one()
        if campaign.count["kills"] % 25 == 0:
            campaign.finish()
    campaign.finish()
    print(dict(campaign.count), campaign.committed)
