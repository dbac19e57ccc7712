"""A run killed, failing or leaving at each point of a save: the old checkpoint or the new, never a half."""

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from trilith.checkpoints import Saver
from trilith.recipes import load_recipe
from trilith.runs.guard import watched
from trilith.runs.heartbeat import read_status
from trilith.runs.launch import process_group
from trilith.runs.metrics import read_metrics
from trilith.testing import run_fresh
from trilith.training import Trainer

Make = Callable[[int], Any]

POINTS = [
    pytest.param("checkpoint.before_data", 1, [2], id="K6-before-its-file", marks=pytest.mark.slow),
    pytest.param("checkpoint.amid_data", 1, [2], id="K6-mid-file"),
    pytest.param("checkpoint.after_data", 1, [2], id="K6-after-its-file", marks=pytest.mark.slow),
    # All files are on the disk and their sums known: the others commit without it.
    pytest.param("checkpoint.before_manifest", 1, [2, 4], id="K6-after-the-exchange", marks=pytest.mark.slow),
    pytest.param("checkpoint.before_manifest", 0, [2], id="K7-before-the-manifest"),
    pytest.param("commit.before_rename", 0, [2], id="K7-between-manifest-and-rename", marks=pytest.mark.slow),
    pytest.param("commit.after_rename", 0, [2, 4], id="K7-between-rename-and-sync"),
    pytest.param("checkpoint.before_retention", 0, [2, 4], id="K8-before-retention", marks=pytest.mark.slow),
    pytest.param("commit.amid_removal", 0, [4], id="K8-amid-retention"),
]


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "K9"])
@pytest.mark.parametrize(("at", "rank", "saved"), POINTS)
def test_a_kill_during_a_save_leaves_the_old_or_the_new(make, at, rank, saved, background):
    run = make(6)
    changes = [f"checkpoint.background={str(background).lower()}", "timeout=20"]
    keep = 1 if at == "commit.amid_removal" else 2
    when = {"commit.amid_removal": "time=1"}.get(at, "time=2" if at.startswith("commit") else "step=4")
    codes = run.ranks(*changes, f"checkpoint.keep={keep}", fault=f"rank={rank};at={at};{when};act=kill")
    assert codes[rank] == -9, codes[rank].output
    assert codes[1 - rank] == 3, codes[1 - rank].output
    assert run.steps_saved == saved
    assert run.ranks(*changes) == [0, 0]
    assert run.steps_saved == [4, 6]
    assert not list((run.out / "checkpoints").glob("*.tmp-*"))


@pytest.mark.parametrize("slow", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_writes_slowly_holds_up_nobody_and_breaks_nothing_K9(make, slow):
    """The other rank steps on, and the two agree on signals while they still agree on the checkpoint."""
    run = make(30)
    changes = ["checkpoint.background=true", "checkpoint.every=10", "checkpoint.keep=5", "timeout=20"]
    codes = run.ranks(*changes, fault=f"rank={slow};at=checkpoint.amid_data;step=10;act=sleep:1")
    assert codes == [0, 0], [code.output for code in codes]
    assert run.steps_saved == [10, 20, 30]


def leave(recipe, how):
    """Save in the background, slowly, and leave in the middle of it."""
    loaded = load_recipe(Path(recipe), ["checkpoint.background=true", "steps=2"])
    with process_group(loaded.layout, timeout=timedelta(seconds=20)) as state:
        trainer = Trainer(loaded, state, quiet=True)
        real = trainer._saver

        def saver():
            made = real()
            save = made.save

            def save_and_leave(progress):
                save(progress)
                if how == "exit":
                    sys.exit(0)
                if how == "error":
                    raise KeyError("in the loop")
                if how == "destroy":
                    torch.distributed.destroy_process_group()
                    sys.exit(0)

            made.save = save_and_leave
            return made

        with mock.patch.object(trainer, "_saver", saver):  # to stand between the loop and its saves
            trainer.run()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("return", marks=pytest.mark.slow),
        pytest.param("exit", marks=pytest.mark.slow),
        pytest.param("error", marks=pytest.mark.slow),
        "destroy",
    ],
)
def test_leaving_amid_a_save_in_the_background_leaves_all_of_it_or_nothing_K10(make, how):
    run = make(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRILITH_FAULT", "rank=1;at=checkpoint.amid_data;act=sleep:1")
        codes = run_fresh(leave, 2, str(run.recipe), how, process_group=False, timeout=60)
    whole = ([2], []) if how == "destroy" else ([2],)  # destroyed early, the group may fail the agreement
    assert run.steps_saved in whole, [code.output for code in codes]
    assert run.ranks() == [0, 0]
    assert run.steps_saved == [2]


def fail_while_saving(recipe):
    """Fail in the loop while the checkpoint is still being written; say what is written when the error is
    heard, and end without waiting for the rest.
    """
    loaded = load_recipe(Path(recipe), ["checkpoint.background=true", "layout.data=1", "layout.zero=0"])
    with process_group(loaded.layout) as state:
        trainer = Trainer(loaded, state, quiet=True)

        def fail(metrics):
            if metrics.step == 2:  # the checkpoint of two steps was begun
                raise KeyError("in the loop")

        with mock.patch("trilith.checkpoints.save._LAST_CHANCE", 0.2), suppress(KeyError):
            trainer.run(after_step=fail)
        written = sorted(path.name for path in (Path(recipe).parent / "run" / "checkpoints").iterdir())
        print(f"heard beside {written}", flush=True)
        os._exit(0)


def test_an_error_does_not_wait_for_a_save_in_the_background(make):
    """The writing sleeps longer than the ranks may take."""
    run = make(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRILITH_FAULT", "rank=0;at=checkpoint.amid_data;act=sleep:200")
        (code,) = run_fresh(fail_while_saving, 1, str(run.recipe), process_group=False, timeout=60)
    assert code == 0, code.output
    (beside,) = re.findall(r"heard beside \['(.*)'\]", code.output)
    assert beside.startswith("step-00000002.tmp-")


def fail_and_say_when(recipe, status):
    """Fail in the loop; print this rank's status when the saver begins to wait for its thread."""
    loaded = load_recipe(Path(recipe), ["checkpoint.background=true", "layout.data=1", "layout.zero=0"])
    leave = Saver.__exit__

    def look_and_leave(saver, *error):
        (said,) = read_status(Path(status), run="now")
        print(f"told {said.code} {said.error}")
        leave(saver, *error)

    with watched(Path(status), 0, 1, run="now") as beat, process_group(loaded.layout) as state:
        trainer = Trainer(loaded, state, beat=beat, quiet=True)

        def fail(metrics):
            raise KeyError("in the loop")

        with mock.patch.object(Saver, "__exit__", look_and_leave):
            trainer.run(after_step=fail)


def test_an_error_is_in_the_rank_s_status_before_the_saver_waits(make, tmp_path):
    run = make(4)
    (code,) = run_fresh(fail_and_say_when, 1, str(run.recipe), str(tmp_path / "status"), process_group=False)
    assert code == 1
    assert "told 1 KeyError: 'in the loop'" in code.output


@pytest.mark.parametrize(
    "background", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["at-once", "K9"]
)
def test_the_only_checkpoint_stays_until_the_next_is_committed_K11(make, background):
    run = make(4)
    changes = [f"checkpoint.background={str(background).lower()}", "checkpoint.keep=1", "timeout=20"]
    run.ranks(*changes, fault="rank=0;at=commit.before_rename;time=2;act=kill")
    assert run.steps_saved == [2]
    run.ranks(*changes)
    assert run.steps_saved == [4]


def soak(run, kills, seed):
    """Kill ranks at random moments of a run that saves at every step; it never loses a committed save."""
    random = Random(seed)
    committed = 0
    for number in range(kills):
        changes = ["checkpoint.every=1", "checkpoint.keep=2", "timeout=20", f"stop_after={committed + 6}"]
        changes.append(f"checkpoint.background={str(bool(number % 2)).lower()}")
        point = random.choice(SOAKED)
        fault = f"rank={random.randrange(2)};at={point};time={random.randint(1, 5)};act=kill"
        codes = run.ranks(*changes, fault=fault)
        assert {*codes} <= {-9, 0, 3}, [code.output for code in codes]
        saved = run.steps_saved  # reads every byte
        assert (saved and saved[-1] >= committed) or not committed, (saved, committed, fault)
        committed = saved[-1] if saved else 0
    assert run.ranks("checkpoint.every=0", f"stop_after={committed + 2}") == [0, 0]
    assert run.steps_saved[-1] == committed + 2
    lines = read_metrics(run.out / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(committed + 2)]


SOAKED = [
    "step.forward",
    "checkpoint.before_data",
    "checkpoint.amid_data",
    "checkpoint.after_data",
    "checkpoint.before_manifest",
    "commit.before_rename",
    "commit.after_rename",
    "commit.amid_removal",
]


@pytest.mark.parametrize(
    "kills", [pytest.param(3, id="K19-short"), pytest.param(50, id="K19", marks=pytest.mark.slow)]
)
def test_kills_at_random_moments_lose_nothing_that_was_committed(make, kills):
    soak(make(1000), kills, seed=kills)
