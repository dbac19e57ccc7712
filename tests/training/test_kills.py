"""Ranks that are killed, fail, or are asked to stop: who says what, with which code, and what is left.

A save that a rank is killed in, or leaves, leaves the old checkpoint or the new one, never a half.
"""

import os
import re
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.kills import Kill, killed_runs, wait_for
from trilith.checkpoints import Saver
from trilith.recipes import load_recipe
from trilith.runs.guard import is_collective_failure, watched
from trilith.runs.heartbeat import read_status
from trilith.runs.launch import process_group
from trilith.runs.metrics import read_metrics
from trilith.testing import run_fresh
from trilith.training import Trainer

AT_ONCE, BACKGROUND = "checkpoint.background=false", "checkpoint.background=true"


def at_once_and_in_background(why, *ends, changes, slow=False, **more):
    for background, name in ((AT_ONCE, why), (BACKGROUND, f"{why}-K9")):
        is_slow = slow or background == BACKGROUND
        yield Kill(name, *ends, changes=[background, *changes], slow=is_slow, **more)


def in_a_save(why, at, rank, saved, *, slow=False):
    """Kills of a rank in its second save."""
    return at_once_and_in_background(
        why,
        f"rank={rank};at={at};act=kill",
        (-9, 3) if rank == 0 else (3, -9),
        saved,
        [6] if "removal" in at else [4, 6],
        changes=["timeout=20", f"checkpoint.keep={1 if 'removal' in at else 2}"],
        slow=slow,
    )


def a_slow_writer(rank, *, slow=False):
    """The other rank steps on, and the two agree on signals while they still agree on the checkpoint."""
    return Kill(
        f"K9-a-rank-{rank}-that-writes-slowly-holds-up-nobody",
        f"rank={rank};at=checkpoint.amid_data;step=10;act=sleep:1",
        codes=(0, 0),
        saved=[10, 20],
        changes=[BACKGROUND, "checkpoint.every=10", "checkpoint.keep=5", "timeout=20"],
        steps=20,
        slow=slow,
    )


test_a_fault_leaves_the_old_checkpoints_or_the_new_one_and_the_run_goes_on = killed_runs(
    *in_a_save("K6-before-its-file", "checkpoint.before_data;step=4", 1, [2], slow=True),
    *in_a_save("K6-mid-file", "checkpoint.amid_data;step=4", 1, [2]),
    *in_a_save("K6-after-its-file", "checkpoint.after_data;step=4", 1, [2], slow=True),
    # All files are on the disk and their sums known: the others commit without it.
    *in_a_save("K6-after-the-exchange", "checkpoint.before_manifest;step=4", 1, [2, 4], slow=True),
    *in_a_save("K7-before-the-manifest", "checkpoint.before_manifest;step=4", 0, [2]),
    *in_a_save("K7-between-manifest-and-rename", "commit.before_rename;time=2", 0, [2], slow=True),
    *in_a_save("K7-between-rename-and-sync", "commit.after_rename;time=2", 0, [2, 4], slow=True),
    *in_a_save("K8-before-retention", "checkpoint.before_retention;step=4", 0, [2, 4], slow=True),
    *in_a_save("K8-amid-retention", "commit.amid_removal;time=1", 0, [4]),
    *at_once_and_in_background(
        "K5_G21-a-full-disk",
        "rank=1;at=checkpoint.before_data;step=4;act=enospc",
        (3, 3),
        [2],
        says=("No space left on device",) * 2,
        cause=1,
        changes=[],
    ),
    *at_once_and_in_background(
        "K11-the-only-checkpoint",
        "rank=0;at=commit.before_rename;time=2;act=kill",
        (-9, 3),
        [2],
        [4],
        changes=["checkpoint.keep=1", "timeout=20"],
        steps=4,
    ),
    a_slow_writer(0, slow=True),
    a_slow_writer(1),
    Kill(
        "K16-a-rank-without-memory",
        "rank=1;at=step.forward;step=3;act=memory",
        codes=(3, 3),
        saved=[2],
        says=("rank 1 failed in step of step 3", "out of memory"),
        changes=["timeout=20", "data.micro_batch=4"],
    ),
    Kill(
        "K17-numbers-that-are-not-finite",
        "",
        codes=(3, 3),
        saved=[],
        says=("is not finite; nothing was updated",) * 2,
        changes=["optimizer.lr=1e30", "optimizer.schedule=constant"],
    ),
)


def test_a_killed_rank_is_named_and_the_run_goes_on_from_the_last_checkpoint_K1(make):
    run = make(6)
    code, errors = run.finish(fault="rank=1;at=step.forward;step=5;act=kill")
    assert code == 3
    assert errors.count("\n") == 1
    assert "a collective failed: rank 1 died or hangs in step of step" in errors
    assert errors.endswith("; rank 1 was killed by signal 9\n")
    assert run.status(0)["code"] == 3
    assert run.steps_saved == [2, 4]
    assert run.ranks() == [0, 0]
    assert run.steps_saved == [4, 6]
    assert [line["step"] for line in read_metrics(run.out / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]


def test_the_error_of_the_rank_that_failed_is_the_one_reported_K3(make):
    run = make(4)
    code, errors = run.finish(fault="rank=1;at=step.forward;step=3;act=raise")
    assert code == 70
    assert errors.count("\n") == 1 and "rank 1: RuntimeError: " in errors and "step.forward" in errors
    assert run.steps_saved == [2]


@pytest.mark.parametrize(
    ("text", "of_a_collective"),
    [
        ("[/w/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error", True),
        ("[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1000 ms", True),
        ("Timed out waiting for compile worker", False),
        ("Connection to the database was lost", False),
        ("[Errno 32] Broken pipe", False),
    ],
)
def test_a_failed_collective_is_known_by_its_library_s_mark(text, of_a_collective):
    assert is_collective_failure(RuntimeError(text)) == of_a_collective


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="K12-SIGTERM"),
        pytest.param(signal.SIGINT, id="K14-SIGINT", marks=pytest.mark.slow),
    ],
)
def test_a_launcher_that_is_asked_to_stop_lets_the_ranks_save_and_says_so(make, number):
    run = make(5000)
    with run.launched("checkpoint.every=0") as process:
        wait_for(lambda: len(read_metrics(run.out / "metrics.jsonl")) > 3)
        os.kill(process.pid, number)
        os.kill(process.pid, number)
        code, errors = process.end()
    assert code == 75, "a rank that does not leave within its grace ends with 3"
    assert "asked to stop: saved after step" in errors
    (step,) = run.steps_saved
    assert step == len(read_metrics(run.out / "metrics.jsonl"))


def test_another_layout_is_told_and_resumed_G15(make):
    run = make(4)
    assert run.ranks("stop_after=2") == [0, 0]
    (code,) = run.ranks("layout.data=1", "layout.zero=0", world=1, quiet=False)
    assert code == 0
    assert "step-00000002 (written by data 2, zero 1)" in " ".join(code.output.split())
    assert run.steps_saved == [2, 4]


def leave(recipe, how):
    """Save in the background, slowly, and leave in the middle of it."""
    loaded, save = load_recipe(Path(recipe), [BACKGROUND, "steps=2"]), Saver.save

    def save_and_leave(saver, progress):
        save(saver, progress)
        if how == "error":
            raise KeyError("in the loop")
        if how == "destroy":
            torch.distributed.destroy_process_group()
        if how != "return":
            sys.exit(0)

    with process_group(loaded.layout, timeout=timedelta(seconds=20)) as state:
        trainer = Trainer(loaded, state, quiet=True)
        with mock.patch.object(Saver, "save", save_and_leave):
            trainer.run()


@pytest.mark.parametrize(
    "how", ["destroy", *(pytest.param(how, marks=pytest.mark.slow) for how in ("return", "exit", "error"))]
)
def test_leaving_amid_a_save_in_the_background_leaves_all_of_it_or_nothing_K10(make, how):
    run = make(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRILITH_FAULT", "rank=1;at=checkpoint.amid_data;act=sleep:0.5")
        codes = run_fresh(leave, 2, str(run.recipe), how, process_group=False, timeout=60)
    whole = ([2], []) if how == "destroy" else ([2],)  # destroyed early, the group may fail the agreement
    assert run.steps_saved in whole, [code.output for code in codes]
    assert run.ranks() == [0, 0]
    assert run.steps_saved == [2]


def fail_while_saving(recipe, status):
    """Fail in the loop while a checkpoint is still being written; print this rank's status when the saver
    begins to wait for its thread, and what is written when the error is heard, and wait for nothing else.
    """
    loaded = load_recipe(Path(recipe), [BACKGROUND, "layout.data=1", "layout.zero=0"])
    leave_saver = Saver.__exit__

    def look_and_leave(saver, *error):
        (told,) = read_status(Path(status), run="now")
        print(f"told {told.code} {told.error}", flush=True)
        leave_saver(saver, *error)

    def fail(metrics):
        if metrics.step == 2:  # the checkpoint of two steps was begun
            raise KeyError("in the loop")

    with watched(Path(status), 0, 1, run="now") as beat, process_group(loaded.layout) as state:
        trainer = Trainer(loaded, state, beat=beat, quiet=True)
        with (
            mock.patch.object(Saver, "__exit__", look_and_leave),
            mock.patch("trilith.checkpoints.saver._LAST_CHANCE", 0.2),
            suppress(KeyError),
        ):
            trainer.run(after_step=fail)
        written = sorted(path.name for path in (Path(recipe).parent / "run" / "checkpoints").iterdir())
        print(f"heard beside {written}", flush=True)
        os._exit(0)


def test_an_error_is_told_before_a_save_in_the_background_is_waited_for_and_does_not_wait(make, tmp_path):
    """The writing sleeps longer than the ranks may take."""
    run, status = make(4), str(tmp_path / "status")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRILITH_FAULT", "rank=0;at=checkpoint.amid_data;act=sleep:200")
        (code,) = run_fresh(fail_while_saving, 1, str(run.recipe), status, process_group=False, timeout=60)
    assert code == 0, code.output
    assert re.search(r"told 70 KeyError: 'in the loop' at \S+test_kills.py:\d+\n", code.output)  # his line
    (beside,) = re.findall(r"heard beside \['(.*)'\]", code.output)
    assert beside.startswith("step-00000002.tmp-")
