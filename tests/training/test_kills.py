"""Ranks that are killed, fail, or are asked to stop: who says what, with which code, and what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trilith.checkpoints import complete_checkpoints, read_source, verify
from trilith.testing.runs import TINY_LLAMA, write_tokens
from trilith.training.metrics import read_metrics

RECIPE = """
out = "{out}"
steps = {steps}
log_every = 1
[model]
config = {config}
[layout]
data = 2
zero = 1
[data]
tokens = "{tokens}"
sequence_length = 16
global_batch = 8
micro_batch = 2
[checkpoint]
every = 2
keep = 2
"""


class Run:
    """A recipe of 2 ranks, and the command that runs it."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.out, self.recipe = folder / "run", folder / "recipe.toml"
        config = "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_LLAMA.items()) + "}"
        tokens = write_tokens(folder / "tokens")
        self.recipe.write_text(RECIPE.format(out=self.out, steps=steps, config=config, tokens=tokens))

    def start(self, *overrides: str, fault: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "trilith.cli", "train", str(self.recipe), *overrides]
        environment = {**os.environ, "TRILITH_FAULT": fault, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def finish(self, *overrides: str, fault: str = "", timeout: float = 120) -> tuple[int, str]:
        process = self.start(*overrides, fault=fault)
        _, errors = process.communicate(timeout=timeout)
        return process.returncode, errors

    def status(self, rank: int) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.out / "status" / f"rank{rank}.json").read_text())
        return found

    @property
    def steps_saved(self) -> list[int]:
        folder = self.out / "checkpoints"
        found = complete_checkpoints(folder) if folder.exists() else []
        for path in found:
            manifest = read_source(path).manifest
            assert manifest is not None
            verify(path, manifest)
        return [int(path.name.removeprefix("step-")) for path in found]


@pytest.fixture
def make(tmp_path: Path) -> Callable[[int], Run]:
    return lambda steps: Run(tmp_path, steps)


def wait_until(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def test_a_killed_rank_is_named_and_the_run_goes_on_from_the_last_checkpoint_K1(
    make: Callable[[int], Run],
) -> None:
    run = make(6)
    code, errors = run.finish(fault="rank=1;at=step.forward;step=5;act=kill")
    assert code == 3
    assert errors.count("\n") == 1
    assert "a collective failed: rank 1 died or hangs in step of step" in errors
    assert run.status(0)["code"] == 3
    assert run.steps_saved == [2, 4]
    code, errors = run.finish()
    assert (code, errors) == (0, "")
    assert run.steps_saved == [4, 6]
    assert [line["step"] for line in read_metrics(run.out / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]


def test_the_error_of_the_rank_that_failed_is_the_one_reported_K3(make: Callable[[int], Run]) -> None:
    run = make(4)
    code, errors = run.finish(fault="rank=1;at=step.forward;step=3;act=raise")
    assert code == 1
    assert errors == "error: rank 1: RuntimeError: asked to fail at step.forward\n"
    assert run.steps_saved == [2]


def test_a_full_disk_on_one_rank_is_the_same_error_on_all_and_commits_nothing_K5_G21(
    make: Callable[[int], Run],
) -> None:
    run = make(4)
    code, errors = run.finish(fault="rank=1;at=checkpoint.before_data;step=4;act=enospc")
    assert code == 1
    assert "No space left on device" in errors
    assert run.status(0)["error"] == run.status(1)["error"]
    assert run.steps_saved == [2]
    assert not list((run.out / "checkpoints").glob("*.tmp-*"))


@pytest.mark.parametrize(
    ("at", "rank", "saved"),
    [
        pytest.param("checkpoint.before_data", 1, [2], id="K6-before-its-file", marks=pytest.mark.slow),
        pytest.param("checkpoint.after_data", 1, [2], id="K6-after-its-file"),
        pytest.param("checkpoint.before_manifest", 0, [2], id="K7-before-the-manifest"),
        pytest.param(
            "checkpoint.before_retention", 0, [2, 4, 6], id="K8-before-retention", marks=pytest.mark.slow
        ),
    ],
)
def test_a_kill_during_a_save_leaves_the_old_or_the_new(
    make: Callable[[int], Run], at: str, rank: int, saved: list[int]
) -> None:
    run = make(6)
    step = 6 if saved[-1] == 6 else 4
    code, _ = run.finish(fault=f"rank={rank};at={at};step={step};act=kill")
    assert code == 3
    assert run.steps_saved == saved
    code, errors = run.finish("steps=8")
    assert (code, errors) == (0, "")
    assert run.steps_saved == [6, 8]
    assert not list((run.out / "checkpoints").glob("*.tmp-*"))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="K12-SIGTERM"),
        pytest.param(signal.SIGINT, id="K14-SIGINT", marks=pytest.mark.slow),
    ],
)
def test_asked_to_stop_it_saves_and_says_so(make: Callable[[int], Run], number: signal.Signals) -> None:
    run = make(5000)
    process = run.start("checkpoint.every=0")
    wait_until(lambda: len(read_metrics(run.out / "metrics.jsonl")) > 3)
    asked = time.monotonic()
    process.send_signal(number)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - asked < 25
    assert process.returncode == 75
    assert "asked to stop: saved after step" in errors
    (step,) = run.steps_saved
    assert step == len(read_metrics(run.out / "metrics.jsonl"))


def test_numbers_that_are_not_finite_stop_every_rank_before_the_update_K17(
    make: Callable[[int], Run],
) -> None:
    run = make(6)
    code, errors = run.finish("optimizer.lr=1e30", "optimizer.schedule=constant")
    assert code == 3
    assert "is not finite; nothing was updated" in errors
    assert run.status(0)["error"] == run.status(1)["error"]
