"""Ranks that are killed, fail, or are asked to stop: who says what, with which code, and what is left."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from trilith.checkpoints import convert
from trilith.runs.metrics import read_metrics

Make = Callable[[int], Any]


def wait_until(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def test_a_killed_rank_is_named_and_the_run_goes_on_from_the_last_checkpoint_K1(make):
    run = make(6)
    code, errors = run.finish(fault="rank=1;at=step.forward;step=5;act=kill")
    assert code == 3
    assert errors.count("\n") == 1
    assert "a collective failed: rank 1 died or hangs in step of step" in errors
    assert run.status(0)["code"] == 3
    assert run.steps_saved == [2, 4]
    assert run.ranks() == [0, 0]
    assert run.steps_saved == [4, 6]
    assert [line["step"] for line in read_metrics(run.out / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]


def test_the_error_of_the_rank_that_failed_is_the_one_reported_K3(make):
    run = make(4)
    code, errors = run.finish(fault="rank=1;at=step.forward;step=3;act=raise")
    assert code == 1
    assert errors == "error: rank 1: RuntimeError: asked to fail at step.forward\n"
    assert run.steps_saved == [2]


@pytest.mark.parametrize("background", ["false", "true"], ids=["at-once", "K9"])
def test_a_full_disk_on_one_rank_is_the_same_error_on_all_and_commits_nothing_K5_G21(make, background):
    run = make(6)
    fault = "rank=1;at=checkpoint.before_data;step=4;act=enospc"
    codes = run.ranks(f"checkpoint.background={background}", fault=fault)
    assert codes == [3, 3]
    assert "No space left on device" in codes[0].output
    assert codes[0].output == codes[1].output
    assert run.status(0)["error"] == run.status(1)["error"]
    assert (run.status(0)["cause"], run.status(1)["cause"]) == (False, True)
    assert run.steps_saved == [2]
    assert not list((run.out / "checkpoints").glob("*.tmp-*"))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="K12-SIGTERM"),
        pytest.param(signal.SIGINT, id="K14-SIGINT", marks=pytest.mark.slow),
    ],
)
def test_asked_to_stop_it_saves_and_says_so(make, number):
    run = make(5000)
    with run.launched("checkpoint.every=0") as process:
        wait_until(lambda: len(read_metrics(run.out / "metrics.jsonl")) > 3)
        os.kill(process.pid, number)
        os.kill(process.pid, number)
        code, errors = process.end()
    assert code == 75, "a rank that does not leave within its grace ends with 3"
    assert "asked to stop: saved after step" in errors
    (step,) = run.steps_saved
    assert step == len(read_metrics(run.out / "metrics.jsonl"))


def test_numbers_that_are_not_finite_stop_every_rank_before_the_update_K17(make):
    run = make(6)
    codes = run.ranks("optimizer.lr=1e30", "optimizer.schedule=constant")
    assert codes == [3, 3]
    assert all("is not finite; nothing was updated" in code.output for code in codes)
    assert run.status(0)["error"] == run.status(1)["error"]


def test_another_layout_is_told_and_resumed_G15(make):
    run = make(4)
    assert run.ranks("stop_after=2") == [0, 0]
    (code,) = run.ranks("layout.data=1", "layout.zero=0", world=1, quiet=False)
    assert code == 0
    assert "step-00000002 (written by data_shard 2, zero 1)" in " ".join(code.output.split())
    assert run.steps_saved == [2, 4]


def test_weights_without_moments_do_not_resume_a_run_G14(make):
    run = make(4)
    assert run.ranks("stop_after=2") == [0, 0]
    trained = run.out / "checkpoints" / "step-00000002"
    convert(trained, run.out / "hf", to="hf")
    shutil.rmtree(trained)
    convert(run.out / "hf", run.out / "converted")
    shutil.move(run.out / "converted", trained)  # trilith does not write among a run's checkpoints itself
    codes = run.ranks()
    assert codes == [4, 4]
    for code in codes:
        assert "expected a checkpoint of a training run, found weights alone" in code.output
        assert "Start from it with model.init_from" in code.output
