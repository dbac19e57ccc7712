"""Two runs in one folder: the second is refused, a killed one is in nobody's way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.testing import run_fresh, run_parallel
from trilith.training.run_lock import only_run_in


def enter(folder: str) -> str:
    try:
        with only_run_in(Path(folder), ParallelState.start(Layout.of(data=2)), patience=0.3):
            return "entered"
    except BadInput as error:
        return str(error)


def test_a_second_run_in_the_folder_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with only_run_in(tmp_path, ParallelState.alone()):
        said = run_parallel(enter, 2, str(tmp_path))
    expected = "recipe: out: expected a folder that no other run is using"
    assert all(line.startswith(expected) and "in use" in line for line in said), said
    assert run_parallel(enter, 2, str(tmp_path)) == ["entered", "entered"]


def hold_and_die(folder: str) -> None:
    with only_run_in(Path(folder), ParallelState.alone()):
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_lock_goes_with_its_holder(tmp_path: Path) -> None:
    assert run_fresh(hold_and_die, 1, str(tmp_path), process_group=False) == [-signal.SIGKILL]
    alone = ParallelState.alone()
    with only_run_in(tmp_path, alone, patience=0), pytest.raises(BadInput, match="in use"):
        only_run_in(tmp_path, alone, patience=0).__enter__()
    with only_run_in(tmp_path, alone, patience=0):
        pass
