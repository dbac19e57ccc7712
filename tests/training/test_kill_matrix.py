"""The kill matrix: each part of a run on two nodes is killed in each phase, and the run goes on bitwise.

A node is a torchrun with its rank and a host name of its own. The victim's rank stops itself at a point of
the phase; then the test kills. So a kill falls where it should, however loaded the machine is.
"""

import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from unittest import mock

import pytest
import torch
from support.forked_launch import Node, node_forked
from support.kills import Campaign, free_port, wait_for
from support.short_runs import whole_tensors
from support.stop_and_go import differences
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import fault
from trilith.runs.events import outcome, read_events
from trilith.system.process_info import children_of, process_info
from trilith.testing import run_fresh
from trilith.training import Trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
STEPS, TIMEOUT = 6, 10.0
VICTIMS = ("worker", "launcher", "node")
LAYOUTS = {
    "zero1": ["layout.data=2", "layout.zero=1"],
    "tp2": ["layout.data=1", "layout.zero=0", "layout.tensor=2"],
    "pp2": ["layout.data=1", "layout.zero=0", "layout.pipeline=2"],
    "zero3": ["layout.data=2", "layout.zero=3"],
    "zero2": ["layout.data=2", "layout.zero=2"],
}
#: Points of a save that every rank meets, then those that rank 0 does; the second save is that after step 4.
OF_A_SAVE = [
    f"checkpoint.{at};step=4" for at in ("before_data", "amid_data", "after_data", "before_manifest")
]
OF_RANK_0 = [
    "commit.before_rename;time=2",
    "commit.after_rename;time=2",
    "checkpoint.before_retention;step=4",
]
OF_A_STEP = [f"step={step};time={time}" for step in (3, 4, 5) for time in (1, 2, 3, 4)]
#: By phase: where the victim's rank may stop.
POINTS = {
    "forward": [f"step.amid_forward;{when}" for when in OF_A_STEP],
    "backward": [f"step.backward;{when}" for when in OF_A_STEP],
    "save": OF_A_SAVE,
    "evaluation": [f"evaluation;step=4;time={time}" for time in (1, 2, 3, 4)],
}


class TrainerWithPoints(Trainer):
    """Meet more points at which a rank can fail: in the blocks' forward and backward, and in evaluation."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self._step = 0
        for name, block in self.model.named_modules():
            if re.fullmatch(r"(.*\.)?layers\.\d+", name):
                block.register_forward_hook(self._after_block)

    def at(self, phase, step):
        self._step = step
        super().at(phase, step)

    def _after_block(self, block, given, output):
        if torch.is_grad_enabled():
            self._meet("step.amid_forward")
            output.register_hook(lambda gradient: self._meet("step.backward"))
        else:
            self._meet("evaluation")

    def _meet(self, point):
        fault(point, rank=self.state.rank, step=self._step)


@contextmanager
def soon_silent():
    """Let ranks of another node, which are known by their beats alone, beat often and be silent soon."""
    with (
        mock.patch.multiple("trilith.runs.heartbeat", _BEAT=0.2, SILENT_AFTER=1.5),
        mock.patch("trilith.runs.guard.SILENT_AFTER", 1.5),
    ):
        yield


def train(words):
    with soon_silent(), mock.patch("trilith.training.supervised.Trainer", TrainerWithPoints):
        return run(words)


def be_a_node(words, folder, nodes, port):
    node_forked(train, words, folder, nodes, port)


@dataclass(frozen=True)
class Case:
    """Say what is killed, when, and in which run; ``rank`` is on the victim's node."""

    victim: str
    phase: str
    layout: str
    rank: int
    on_head: bool
    background: bool
    point: str

    def __str__(self):
        words = [self.victim, self.phase, self.layout, f"rank{self.rank}", "head" * self.on_head]
        words += ["background" * self.background, self.point]
        return "-".join(filter(None, words)).replace(" ", "-")

    @property
    def changes(self):
        return [*LAYOUTS[self.layout], f"checkpoint.background={str(self.background).lower()}"]

    @property
    def nodes(self):
        """Return the head and the other node. torchrun sorts nodes by their addresses."""
        head_first = self.on_head == (self.rank == 0)
        addresses = ["127.0.0.1", "127.0.0.2"] if head_first else ["127.0.0.2", "127.0.0.1"]
        mine = f"at={self.point};act=stop"
        faults = [mine, ""] if self.on_head else ["", mine]
        return [Node(*words) for words in zip(("node-head", "node-other"), addresses, faults, strict=True)]


def drawn(number):
    """Draw each field by itself; rank 0 commits."""
    pick = Random(number).choice
    phase, rank = pick([*POINTS]), pick([0, 1])
    points = POINTS[phase] + OF_RANK_0 * (phase == "save" and rank == 0)
    on_head, background = pick([True, False]), pick([True, False])
    return Case(pick(VICTIMS), phase, pick([*LAYOUTS]), rank, on_head, background, pick(points))


#: The case of the default suite, and a hundred that are drawn.
FIRST = Case("node", "backward", "zero1", 0, False, False, "step.backward;step=3;time=3")
CASES = {str(case): case for case in (FIRST, *map(drawn, range(105)))}


class Cluster(Campaign):
    """Hold the processes of a run on two nodes."""

    def __init__(self, run, case, words):
        super().__init__()
        self.run, self.case, self.folder, self.words = run, case, run.folder, words
        self.name = case.nodes[0 if case.on_head else 1].name
        self.victim = -1
        self.all = []

    def start(self, pool):
        """Start all, and wait until the victim's rank stands at its point."""
        started = (be_a_node, 2, self.words, str(self.folder), self.case.nodes, free_port())
        ended = pool.submit(run_fresh, *started, process_group=False, timeout=80)
        wait_for(self._rank_stands, 60, "the rank was at its point", ended=ended)
        return ended

    def _rank_stands(self):
        """Find the rank on the victim's node: torchrun numbers them."""
        for rank in (0, 1):
            if (self.run.out / "status" / f"rank{rank}.json").exists():
                status = self.run.status(rank)
                if status["host"] == self.name and self.stands(int(status["pid"])):
                    self.victim = rank
        return self.victim >= 0

    def kill_the_victim(self):
        """Kill the victim, and let go on what stands and lives."""
        rank = int(self.run.status(self.victim)["pid"])
        torchrun = self.noted(self.folder / f"torchrun-{int(not self.case.on_head)}")
        self.all = self._found()
        assert len(self.all) == 4
        killed = {"worker": [rank], "launcher": [torchrun]}.get(self.case.victim, [rank, torchrun])
        self.kill(killed)
        self.kill({rank} - {*killed}, signal.SIGCONT)

    def _found(self):
        """Look up every process of the two nodes."""
        starters = ("torchrun-0", "torchrun-1")
        numbers = {pid for name in starters if (pid := self.noted(self.folder / name))}
        numbers |= {child.pid for pid in numbers for child in children_of(pid)}
        return [info for pid in numbers if (info := process_info(pid)) is not None]

    def end(self):
        """Kill whatever a failed test has left."""
        self.kill(one.pid for one in self.all or self._found() if self.lives(one))


def same(a, b):
    """Tell whether two checkpoints have the same bits, weights and moments."""
    mine, others = whole_tensors(a), whole_tensors(b)
    return mine.keys() == others.keys() and all(torch.equal(one, others[name]) for name, one in mine.items())


def checkpoint(run, step):
    return run.out / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return an uninterrupted run of the recipe, with all its checkpoints; made once for each layout."""
    known = {}

    def uninterrupted(run, case, evaluation):
        key = " ".join(case.changes)
        if key not in known:
            known[key] = type(run)(tmp_path_factory.mktemp("whole"), STEPS)
            # At each step, because a run that is asked to stop saves at any.
            saving = ["checkpoint.keep=9", "checkpoint.every=1"]
            assert known[key].ranks(*case.changes, *evaluation, *saving) == [0, 0]
        return known[key]

    return uninterrupted


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=id, marks=[pytest.mark.slow] * (case != FIRST)) for id, case in CASES.items()],
)
def test_whatever_is_killed_is_named_leaves_nothing_and_the_run_goes_on_bitwise(make, whole, tmp_path, case):
    run_ = make(STEPS)
    held_out = write_tokens(tmp_path / "held-out", count=500, seed=1)
    evaluation = [f"evaluation.tokens={held_out}", "evaluation.every=2", "evaluation.samples=8"]
    changes = [*case.changes, *evaluation, f"timeout={TIMEOUT:g}"]
    cluster = Cluster(run_, case, ["train", str(run_.recipe), "--quiet", *changes])
    with ThreadPoolExecutor(1) as pool:
        try:
            ended = cluster.start(pool)
            cluster.kill_the_victim()
            wait_for(lambda: not any(map(cluster.lives, cluster.all)), TIMEOUT + 5, "all had ended")
        finally:
            cluster.end()
        codes = ended.result()
    named(cluster, [code.output for code in codes])

    reference = whole(run_, case, evaluation)
    said = [one["step"] for one in read_events(run_.out / "events.jsonl") if one["event"] == "saved"]
    accepted = run_.steps_saved  # reads every byte
    assert max(accepted, default=0) >= max(said, default=0), (accepted, said)
    assert all(same(checkpoint(run_, step), checkpoint(reference, step)) for step in accepted)
    assert run_.ranks(*changes) == [0, 0]
    assert run_.steps_saved[-1] == STEPS
    assert differences(reference.out, run_.out) == []
    assert all(path.name.startswith("step-") for path in (run_.out / "checkpoints").iterdir())


def named(cluster, output):
    """Check that the survivors say who was killed."""
    run_, victim = cluster.run, cluster.victim
    errors = [str(run_.status(rank)["error"]) for rank in (0, 1)]
    with soon_silent():
        found = outcome(run_.out)
    if cluster.case.victim == "launcher":
        assert found.code == 75, (errors, output)
        assert all(f"the launcher of rank {victim} died: saved after step" in one for one in errors), errors
    else:
        assert found.code == 3, (errors, output)
        assert f"rank {victim} died or hangs in " in errors[1 - victim], (errors, output)
        assert f" on {cluster.name})" in errors[1 - victim]
        assert f"rank {victim} died" in found.text
