"""The kill matrix: each part of a run on two nodes is killed in each phase, and the run goes on bitwise.

A node is a torchrun with its rank and a host name of its own, and an export where one runs. The victim's rank
stops itself at a point of the phase; then the test kills. So a kill falls where it should, however loaded the
machine is.
"""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.folders import contents
from support.forked_launch import Forked, Node, node_forked
from support.short_runs import whole_tensors
from trilith.checkpoints import convert
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import fault
from trilith.runs.events import read_events
from trilith.runs.metrics import read_metrics
from trilith.runs.outcome import outcome
from trilith.system.process_info import children_of, process_info
from trilith.testing import run_fresh
from trilith.training import Trainer

Make = Callable[[int], Any]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
STEPS, TIMEOUT = 6, 10.0
VICTIMS = ("worker", "launcher", "node", "head node")
PHASES = ("forward", "backward", "save", "export", "evaluation")
LAYOUTS = (
    ["layout.data=2", "layout.zero=1"],
    ["layout.data=1", "layout.zero=0", "layout.tensor=2"],
    ["layout.data=1", "layout.zero=0", "layout.pipeline=2"],
    ["layout.data=2", "layout.zero=3"],
    ["layout.data=2", "layout.zero=2"],
)
#: Points of a save that every rank meets, then those of rank 0; the second save is that after step 4.
OF_A_SAVE = tuple(
    f"at=checkpoint.{point};step=4" for point in ("before_data", "amid_data", "after_data", "before_manifest")
)
OF_RANK_0 = (
    "at=commit.before_rename;time=2",
    "at=commit.after_rename;time=2",
    "at=checkpoint.before_retention;step=4",
)
OF_AN_EXPORT = (
    "at=convert.before_data",
    "at=convert.after_data",
    "at=commit.before_rename",
    "at=commit.after_rename",
)


class TrainerWithPoints(Trainer):
    """Meet more points at which a rank can fail: in the blocks' forward and backward, and in evaluation."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self._step = 0
        for name, block in self.model.named_modules():
            if re.fullmatch(r"(.*\.)?layers\.\d+", name):
                block.register_forward_hook(self._after_block)

    def _one_step(self, number, *rest):
        self._step = number + 1
        return super()._one_step(number, *rest)

    def _after_block(self, block, given, output):
        if torch.is_grad_enabled():
            self._meet("step.amid_forward")
            output.register_hook(lambda gradient: self._meet("step.backward"))
        else:
            self._meet("evaluation")

    def _meet(self, point):
        fault(point, rank=self.state.rank, step=self._step)


def train(words):
    with mock.patch("trilith.training.supervised.Trainer", TrainerWithPoints):
        return run(words)


def be_a_node(words, folder, nodes, port):
    node_forked(train, words, folder, nodes, port)


def launch_export(words, folder, fault):
    """Be the launcher of an export: start it, and wait for it."""
    os.environ["TRILITH_FAULT"] = fault
    (Path(folder) / "exporter").write_text(str(os.getpid()))
    export = Forked(lambda words: sys.exit(run([*words])), words, dict(os.environ))
    (Path(folder) / "export").write_text(str(export.pid))
    sys.exit(export.wait())


@dataclass(frozen=True)
class Case:
    """Say what is killed, and when. ``number`` varies the moment, the layout, and which node has rank 0."""

    victim: str
    phase: str
    number: int

    @property
    def on_head(self):
        return {"node": False, "head node": True}.get(self.victim, self.number % 2 == 0)

    @property
    def has_rank_0(self):
        return self.number % 2 == 0

    @property
    def varied(self):
        return 3 * VICTIMS.index(self.victim) + self.number

    @property
    def fault(self):
        """Return where the victim's rank stops."""
        points = OF_A_SAVE + OF_RANK_0 * self.has_rank_0
        of_a_step = f"step={3 + self.number % 3};time={1 + self.varied % 4}"
        at = {
            "forward": f"at=step.amid_forward;{of_a_step}",
            "backward": f"at=step.backward;{of_a_step}",
            "save": points[self.varied % len(points)],
            "export": "at=step.amid_forward;step=5",
            "evaluation": f"at=evaluation;step=4;time={1 + self.varied % 4}",
        }
        return f"{at[self.phase]};act=stop"

    @property
    def export_fault(self):
        return f"{OF_AN_EXPORT[self.varied % len(OF_AN_EXPORT)]};rank=0;act=stop"

    @property
    def changes(self):
        background = str(self.phase != "export" and self.number % 3 == 1).lower()
        return [*LAYOUTS[self.number % len(LAYOUTS)], f"checkpoint.background={background}"]

    @property
    def nodes(self):
        """Return the head and the other node. torchrun sorts nodes by their addresses."""
        head_first = self.on_head == self.has_rank_0
        addresses = ["127.0.0.1", "127.0.0.2"] if head_first else ["127.0.0.2", "127.0.0.1"]
        faults = [self.fault, ""] if self.on_head else ["", self.fault]
        return [Node(*one) for one in zip(("node-head", "node-other"), addresses, faults, strict=True)]


def wait_for(condition, seconds, what, ended):
    deadline = time.monotonic() + seconds
    while not condition():
        assert not ended.done(), (what, [code.output for code in ended.result()])
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def lives(one):
    now = process_info(one.pid)
    return now is not None and now.alive and now.started == one.started


def stopped(pid):
    info = process_info(pid)
    return info is not None and info.state == "T"


def noted(path):
    """Return the process id in a file; 0 until it is there."""
    return int((path.read_text() if path.exists() else "") or 0)


class Cluster:
    """Hold the processes of a run on two nodes, and of an export on the victim's node."""

    def __init__(self, run, case, words):
        self.run, self.case, self.folder, self.words = run, case, run.folder, words
        self.name = case.nodes[0 if case.on_head else 1].name
        self.victim = -1
        self.all = []

    def start(self, pool):
        """Start all, and wait until the victim's rank, and the export, stand at their points."""
        with socket.socket() as holder:
            holder.bind(("", 0))
            port = holder.getsockname()[1]
        started = (be_a_node, 2, self.words, str(self.folder), self.case.nodes, port)
        ended = [pool.submit(run_fresh, *started, process_group=False, timeout=80)]
        wait_for(self._rank_stands, 60, "the rank did not come to its point", ended[0])
        if self.case.phase == "export":
            source = self.run.out / "checkpoints" / "step-00000004"
            words = ["convert", str(source), str(self.folder / "hf"), "--to", "hf"]
            given = (launch_export, 1, words, str(self.folder), self.case.export_fault)
            ended.append(pool.submit(run_fresh, *given, process_group=False, timeout=80))
            wait_for(lambda: stopped(noted(self.folder / "export")), 30, "no export at its point", ended[1])
        return ended

    def _rank_stands(self):
        """Find the rank on the victim's node: torchrun numbers them."""
        for rank in (0, 1):
            if (self.run.out / "status" / f"rank{rank}.json").exists():
                status = self.run.status(rank)
                if status["host"] == self.name and stopped(int(status["pid"])):
                    self.victim = rank
        return self.victim >= 0

    def processes(self):
        """Return the process ids of the victim's node: its rank, its torchrun; those of the export."""
        torchrun = noted(self.folder / f"torchrun-{int(not self.case.on_head)}")
        export = self.case.phase == "export"
        return {
            "rank": [int(self.run.status(self.victim)["pid"])],
            "torchrun": [torchrun],
            "export": [noted(self.folder / "export")] * export,
            "exporter": [noted(self.folder / "exporter")] * export,
        }

    def kill(self):
        """Kill the victim, let go on what stands and lives; return when."""
        mine, exporting = self.processes(), self.case.phase == "export"
        self.all = self._found()
        assert len(self.all) == 4 + 2 * exporting
        killed = {
            "worker": mine["export"] if exporting else mine["rank"],
            "launcher": mine["exporter"] if exporting else mine["torchrun"],
        }.get(self.case.victim, [pid for pids in mine.values() for pid in pids])
        died = time.monotonic()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        for pid in {*mine["rank"], *mine["export"]} - {*killed}:
            os.kill(pid, signal.SIGCONT)
        return died

    def _found(self):
        """Look up every process of the two nodes and of the export."""
        starters = ("torchrun-0", "torchrun-1", "exporter")
        numbers = {pid for name in starters if (pid := noted(self.folder / name))}
        numbers |= {child.pid for pid in numbers for child in children_of(pid)}
        return [info for pid in numbers if (info := process_info(pid)) is not None]

    def end(self):
        """Kill whatever a failed test has left."""
        for one in filter(lives, self.all or self._found()):
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)


def same(a, b):
    """Tell whether two checkpoints have the same bits, weights and moments."""
    mine, others = whole_tensors(a), whole_tensors(b)
    return mine.keys() == others.keys() and all(torch.equal(one, others[name]) for name, one in mine.items())


def curve(out):
    lines = read_metrics(out / "metrics.jsonl")
    return [(line["step"], line["loss"], line["grad_norm"], line.get("evaluation_loss")) for line in lines]


def checkpoint(run, step):
    path = run.out / "checkpoints" / f"step-{step:08d}"
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return an uninterrupted run of the recipe, with all its checkpoints; made once for each layout."""
    known = {}

    def uninterrupted(run, case, evaluation):
        key = " ".join(case.changes)
        if key not in known:
            known[key] = type(run)(tmp_path_factory.mktemp("whole"), STEPS)
            saving = [
                "checkpoint.keep=9",
                "checkpoint.every=1",
            ]  # a run that is asked to stop saves at any step
            assert known[key].ranks(*case.changes, *evaluation, *saving) == [0, 0]
        return known[key]

    return uninterrupted


CASES = [
    pytest.param(
        Case(victim, phase, number),
        id=f"{victim}-{phase}-{number}".replace(" ", "-"),
        marks=[] if (victim, phase, number) == ("node", "backward", 0) else [pytest.mark.slow],
    )
    for number in range(5)
    for victim in VICTIMS
    for phase in PHASES
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", CASES)
def test_whatever_is_killed_is_named_leaves_nothing_and_the_run_goes_on_bitwise(
    make, whole, tmp_path, case, capsys
):
    run_ = make(STEPS)
    held_out = write_tokens(tmp_path / "held-out", count=500, seed=1)
    evaluation = [f"evaluation.tokens={held_out}", "evaluation.every=2", "evaluation.samples=8"]
    changes = [*case.changes, *evaluation, f"timeout={TIMEOUT:g}"]
    cluster = Cluster(run_, case, ["train", str(run_.recipe), "--quiet", *changes])
    with ThreadPoolExecutor(2) as pool:
        try:
            ended = cluster.start(pool)
            died = cluster.kill()
            while any(map(lives, cluster.all)):
                assert time.monotonic() - died < TIMEOUT + 5, [*filter(lives, cluster.all)]
                time.sleep(0.02)
        finally:
            cluster.end()
        codes = ended[0].result()
    named(cluster, [code.output for code in codes])

    reference = whole(run_, case, evaluation)
    said = [one["step"] for one in read_events(run_.out / "events.jsonl") if one["event"] == "saved"]
    accepted = run_.steps_saved  # reads every byte
    assert max(accepted, default=0) >= max(said, default=0), (accepted, said)
    assert all(same(checkpoint(run_, step), checkpoint(reference, step)) for step in accepted)
    if case.phase == "export":
        exported(run_, reference, tmp_path, capsys)
    assert run_.ranks(*changes) == [0, 0]
    assert curve(run_.out) == curve(reference.out)
    assert run_.steps_saved[-1] == STEPS
    assert same(checkpoint(run_, STEPS), checkpoint(reference, STEPS))
    assert all(path.name.startswith("step-") for path in (run_.out / "checkpoints").iterdir())


def named(cluster, output):
    """Check that the survivors say who was killed; a run goes on while its export is killed."""
    run_, victim = cluster.run, cluster.victim
    errors = [str(run_.status(rank)["error"]) for rank in (0, 1)]
    found = outcome(run_.out)
    if cluster.case.phase == "export" and cluster.case.victim in ("worker", "launcher"):
        assert found.code == 0, (errors, output)
    elif cluster.case.victim == "launcher":
        assert found.code == 75, (errors, output)
        assert all(f"the launcher of rank {victim} died: saved after step" in one for one in errors), errors
    else:
        assert found.code == 3, (errors, output)
        assert f"rank {victim} died or hangs in " in errors[1 - victim], (errors, output)
        assert f" on {cluster.name})" in errors[1 - victim]
        assert f"rank {victim} died" in found.text


def exported(run_, reference, folder, capsys):
    """Check that the export is whole, or absent and named as killed; the same command completes it."""
    convert(checkpoint(reference, 4), folder / "whole-hf", to="hf")
    there = (folder / "hf").exists()
    if there:
        assert contents(folder / "hf") == contents(folder / "whole-hf")
    else:
        capsys.readouterr()
        assert run(["verify", str(folder / "hf")]) == 2
        said = capsys.readouterr().err
        assert (
            said.startswith(f"error: {folder / 'hf'}: ") and "what a killed command left in hf.tmp-" in said
        )
        assert said.endswith("Run the same command again: it completes the output\n")
    assert run(["convert", str(checkpoint(run_, 4)), str(folder / "hf"), "--to", "hf"]) == (2 if there else 0)
    assert there or "a command that wrote it was killed" in capsys.readouterr().err
    assert contents(folder / "hf") == contents(folder / "whole-hf")
    assert not [*folder.glob("hf.tmp-" + "?" * 16)]
