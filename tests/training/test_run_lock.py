"""Two runs in one folder: the second is refused and touches nothing, a killed one is in nobody's way."""

import json
import os
import re
import shutil
import signal
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest import mock

import pytest
from support.forked_launch import forget_the_launcher
from support.kills import Campaign, wait_for
from support.short_runs import tiny_recipe, trainer_of
from trilith.cli.app import run
from trilith.cluster import job as job_module
from trilith.cluster.job import EXCLUDED_NODES
from trilith.parallel_state import BadInput, ParallelState, PeerFailed
from trilith.runs.lock import inherits_lock, lock_folder, only_run_in
from trilith.runs.metrics import read_metrics
from trilith.runs.requests import Switches
from trilith.storage.disk import FileLock
from trilith.storage.file_names import holds_steps
from trilith.system.process_end import leave
from trilith.testing import run_fresh, run_parallel

ONE_RANK = ["layout.data=1", "layout.zero=0"]


def everything(folder):
    """Return each entry of the folder, and the folder itself, with its time of change and its content."""
    paths = [folder, *folder.rglob("*")]
    return {
        str(path): (path.stat().st_mtime_ns, b"" if path.is_dir() else path.read_bytes()) for path in paths
    }


def start_impatiently(arguments, launched):
    if not launched:
        forget_the_launcher()
    with mock.patch("trilith.runs.lock._PATIENCE", 0.1):
        leave(run(["train", *arguments]))


def start_beside_another(arguments, status):
    """Start so; if another run has the folder, let that one go on, which stands still in a step."""

    def stands():
        return status.exists() and Campaign.stands(json.loads(status.read_text())["pid"])

    forget_the_launcher()
    with mock.patch("trilith.runs.lock._PATIENCE", 0.1):
        code = run(["train", *arguments])
    if code:
        wait_for(stands, what="the other run came to its second step")
        os.kill(json.loads(status.read_text())["pid"], signal.SIGCONT)
    leave(code)


@pytest.fixture(scope="module")
def begun(make_in, tmp_path_factory):
    """Return a run that has stopped after two steps; a start that is refused leaves it so."""
    run = make_in(tmp_path_factory.mktemp("begun"), 4)
    assert run.ranks("stop_after=2") == [0, 0]
    return run


@pytest.mark.parametrize(
    ("ranks", "launched", "changes"),
    [(2, True, []), (1, True, ONE_RANK), (1, False, ONE_RANK), (1, False, [])],
    ids=["ranks-of-torchrun", "rank-of-torchrun", "one-rank", "launcher"],
)
def test_a_second_start_waits_says_so_and_touches_nothing(begun, ranks, launched, changes):
    run = begun
    arguments = [str(run.recipe), "--quiet", *changes]
    with lock_folder(run.out):  # forgets the status of the run that ended
        (run.out / "status" / "rank0.json").write_text("of the run that has the folder")
        before = everything(run.out)
        codes = run_fresh(start_impatiently, ranks, arguments, launched, process_group=False)
        assert everything(run.out) == before
    assert codes == [2] * ranks, codes[0].output
    assert f"{run.out} is in use by another run: waiting up to 0.1 s for it to end" in codes[0].output
    for code in codes:
        assert "error: recipe: out: expected a folder that no other run is using" in code.output


def test_of_two_starts_on_a_fresh_folder_exactly_one_trains(make, monkeypatch):
    run = make(3)
    monkeypatch.setenv("TRILITH_FAULT", "rank=0;at=step.forward;step=2;act=stop")
    arguments, status = [str(run.recipe), "--quiet", *ONE_RANK], run.out / "status" / "rank0.json"
    codes = run_fresh(start_beside_another, 2, arguments, status, process_group=False)
    assert sorted(codes) == [0, 2], [code.output for code in codes]
    assert [line["step"] for line in read_metrics(run.out / "metrics.jsonl")] == [0, 1, 2]
    assert run.steps_saved == [2, 3]
    assert run.status(0)["code"] == 0


def test_a_pipe_in_place_of_the_lock_is_refused_and_not_waited_for(make):
    run = make(1)
    run.out.mkdir()
    os.mkfifo(run.out / "run.lock")
    arguments = [str(run.recipe), "--quiet", *ONE_RANK]
    (code,) = run_fresh(start_impatiently, 1, arguments, False, process_group=False, timeout=60)
    assert code == 2 and f"{run.out}/run.lock" in code.output, code.output
    assert [path.name for path in run.out.iterdir()] == ["run.lock"]


def test_the_lock_that_a_launcher_hands_on_is_told_from_another_s(tmp_path):
    before = os.dup(0)
    try:
        with lock_folder(tmp_path) as lock:
            assert not inherits_lock(tmp_path)
            os.dup2(lock, 0)
            assert inherits_lock(tmp_path)
            other = os.open(tmp_path / "run.lock", os.O_RDONLY)
            os.dup2(other, 0)
            os.close(other)
            assert not inherits_lock(tmp_path)
    finally:
        os.dup2(before, 0)
        os.close(before)


def test_who_takes_the_folder_forgets_what_an_earlier_run_s_ranks_said_and_no_other_file(tmp_path):
    """An earlier, larger world leaves files that nobody replaces; killed ranks leave half-written files."""
    others = {"rankings.json", "rank.json", "rank1.json.bak"}
    (tmp_path / "status").mkdir()
    records = ("collectives-rank0.json", "nccl-rank1")
    for name in ("rank0.json", "rank1.json", "rank5.json", "rank1.tmp", *records, *others):
        (tmp_path / "status" / name).write_text("{}")
    with only_run_in(tmp_path, ParallelState.alone()) as run:
        assert {path.name for path in (tmp_path / "status").iterdir()} == others
    with only_run_in(tmp_path, ParallelState.alone()) as again:
        assert run != again


def run_in_a_removed_folder(raw, taken):
    """Remove the folder after a step, and take its lock; return how the run ends, and if it has a lock."""
    trainer, locks, again = trainer_of(raw), ExitStack(), []

    def remove(metrics):
        if trainer.first and metrics.step == 0:
            shutil.rmtree(trainer.out)
            locks.enter_context(lock_folder(trainer.out) if taken else nullcontext())
        elif trainer.first:
            again.append(FileLock.take(trainer.out / "run.lock") is None)

    with locks, only_run_in(trainer.out, trainer.state):
        try:
            trainer.run(remove)
        except PeerFailed as error:
            return str(error)
    return again, holds_steps(trainer.out / "checkpoints")


def test_who_removes_a_run_s_folder_leaves_it_a_lock_or_ends_it_for_another(tmp_path, tokens):
    alone, other = (
        tiny_recipe(tmp_path / name, tokens, layout={"tensor": 2}, steps=3) for name in ("alone", "other")
    )
    assert run_parallel(run_in_a_removed_folder, 2, alone, False) == [([True, True], True), ([], True)]
    for line in run_parallel(run_in_a_removed_folder, 2, other, True):
        assert line == f"{other['out']}: removed while the run went on, and another run may have it now"
    assert not holds_steps(tmp_path / "other" / "checkpoints")


def enter_alone(folder):
    with only_run_in(folder, ParallelState.alone(), patience=0):
        pass


def test_a_folder_of_other_files_is_no_place_for_a_run(tmp_path):
    texts, begun, logged = (tmp_path / name for name in ("texts", "begun", "logged"))
    for folder in (texts, begun / "checkpoints" / "step-00000001", logged):
        folder.mkdir(parents=True)
    (logged / "events.jsonl").touch()
    for place in (texts, begun, logged):
        (place / "part0.txt").write_text("a text")
    before = everything(texts)
    with pytest.raises(
        BadInput, match=r"new folder, or a run's, found .*part0\.txt, which no run of trilith"
    ):
        enter_alone(texts)
    assert everything(texts) == before
    enter_alone(begun)
    enter_alone(logged)


@pytest.mark.parametrize("again", [False, True], ids=["first", "after-a-start"])
def test_what_a_job_or_a_former_start_left_is_no_other_file(tmp_path, again):
    made = re.findall(r'"\$out/([\w-]+)"', Path(job_module.__file__).with_name("job.sbatch").read_text())
    assert "job-started" in made
    for name in (*made, EXCLUDED_NODES, *Switches.names, "recipe.toml", "job-1.log", ".nfs01"):
        (tmp_path / name).touch()
    if again:
        enter_alone(tmp_path)
        (tmp_path / "report.html").touch()
    enter_alone(tmp_path)


@pytest.mark.parametrize("log", ["metrics.jsonl", "norms.jsonl"])
def test_logs_that_no_run_wrote_are_not_begun_anew(make, log):
    run = make(3)
    run.out.mkdir()
    (run.out / log).write_text('{"epoch": 1}\n')
    before = everything(run.out)
    for launched in (False, True):
        arguments = [str(run.recipe), "--quiet", *ONE_RANK]
        (code,) = run_fresh(start_impatiently, 1, arguments, launched, process_group=False)
        assert code == 2 and f"{log}, which no run of trilith wrote" in code.output, code.output
        assert everything(run.out) == before
