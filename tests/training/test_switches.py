"""Steer a run by files in its folder: ``stop``, ``save`` and ``kill``."""

from pathlib import Path

import pytest
from support.short_runs import losses, tiny_recipe, train
from trilith.checkpoints import complete_checkpoints
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import ParallelState
from trilith.recipes import parse_recipe
from trilith.runs.stop_signals import Preempted
from trilith.runs.switches import Killed
from trilith.testing import run_parallel
from trilith.training import Trainer


def steer(raw, name, after):
    """Run the recipe, and let rank 0's folder get the file after so many steps; return how the run ended."""
    recipe = parse_recipe(raw)
    state = ParallelState.start(recipe.layout)

    def touch(metrics):
        if metrics.step == after and state.rank == 0:
            (Path(recipe.out) / name).touch()

    try:
        Trainer(recipe, state, quiet=True).run(touch)
    except (Preempted, Killed) as error:
        return f"{error.exit_code}: {error}"
    return "finished"


def saved(raw):
    folder = Path(raw["out"]) / "checkpoints"
    return [path.name for path in complete_checkpoints(folder)] if folder.exists() else []


def recipe(folder, **changes):
    return tiny_recipe(folder / "run", write_tokens(folder / "tokens"), **changes)


@pytest.mark.parametrize("world", [1, 2])
def test_stop_saves_on_all_ranks_after_the_step_at_hand_and_the_run_goes_on_bitwise(world, tmp_path):
    raw = recipe(tmp_path, layout={"data": world})
    ended = run_parallel(steer, world, raw, "stop", 1)
    assert ended == ["75: asked to stop: saved after step 3; the same command goes on from there"] * world
    assert saved(raw) == ["step-00000003"] and not (tmp_path / "run/stop").exists()
    train(raw)
    train(raw | {"out": str(tmp_path / "whole")})
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_save_saves_once_and_the_run_goes_on(tmp_path):
    raw = recipe(tmp_path)
    assert run_parallel(steer, 1, raw, "save", 1) == ["finished"]
    assert saved(raw) == ["step-00000003", "step-00000006"] and not (tmp_path / "run/save").exists()


def test_kill_ends_all_ranks_without_a_checkpoint(tmp_path):
    raw = recipe(tmp_path, layout={"data": 2})
    said = f"3: ended after step 3 by the file {tmp_path / 'run/kill'}"
    assert run_parallel(steer, 2, raw, "kill", 1) == [said] * 2
    assert saved(raw) == [] and not (tmp_path / "run/kill").exists()


def test_a_file_from_before_the_start_does_nothing(tmp_path):
    raw = recipe(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("stop", "save", "kill"):
        (tmp_path / "run" / name).touch()
    train(raw)
    assert saved(raw) == ["step-00000006"]
    assert {path.name for path in (tmp_path / "run").iterdir()}.isdisjoint({"stop", "save", "kill"})
