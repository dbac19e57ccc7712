"""A run killed, failing or leaving at each point of a save: the old checkpoint or the new, never a half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[[int], Any]

POINTS = [
    pytest.param("checkpoint.before_data", 1, [2], id="K6-before-its-file"),
    pytest.param("checkpoint.amid_data", 1, [2], id="K6-mid-file"),
    pytest.param("checkpoint.after_data", 1, [2], id="K6-after-its-file"),
    # All files are on the disk and their sums known: the others commit without it.
    pytest.param("checkpoint.before_manifest", 1, [2, 4], id="K6-after-the-exchange"),
    pytest.param("checkpoint.before_manifest", 0, [2], id="K7-before-the-manifest"),
    pytest.param("commit.before_rename", 0, [2], id="K7-between-manifest-and-rename"),
    pytest.param("commit.after_rename", 0, [2, 4], id="K7-between-rename-and-sync"),
    pytest.param("checkpoint.before_retention", 0, [2, 4], id="K8-before-retention"),
    pytest.param("commit.amid_removal", 0, [4], id="K8-amid-retention"),
]


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "K9"])
@pytest.mark.parametrize(("at", "rank", "saved"), POINTS)
def test_a_kill_during_a_save_leaves_the_old_or_the_new(
    make: Make, at: str, rank: int, saved: list[int], background: bool
) -> None:
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


@pytest.mark.parametrize("background", [False, True], ids=["at-once", "K9"])
def test_the_only_checkpoint_stays_until_the_next_is_committed_K11(make: Make, background: bool) -> None:
    run = make(4)
    changes = [f"checkpoint.background={str(background).lower()}", "checkpoint.keep=1", "timeout=20"]
    run.ranks(*changes, fault="rank=0;at=commit.before_rename;time=2;act=kill")
    assert run.steps_saved == [2]
    run.ranks(*changes)
    assert run.steps_saved == [4]
