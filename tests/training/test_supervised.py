"""``training.run``: a run with all that surrounds it, and files in its folder that steer it.

``deterministic = true`` holds while the ranks run, and no longer; which ranks share random numbers.
"""

import json
import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.short_runs import losses, run_recipe, tiny_recipe, train, trainer_of, write_recipe
from trilith.checkpoints import complete_checkpoints
from trilith.data import TokenFile
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import Layout, ParallelState
from trilith.recipes import parse_recipe
from trilith.runs import launch
from trilith.runs.heartbeat import status_folder
from trilith.runs.metrics import read_metrics
from trilith.runs.requests import Killed, Preempted
from trilith.testing import run_parallel
from trilith.training import Step, Trainer, run, run_plan, supervised
from trilith.training.supervised import deterministic
from trilith.training.trainer import random_seed


@contextmanager
def counted():
    """Count, in the ``with`` block, the plans that this process makes and the token files that it opens."""
    found = Counter()
    plan, opened = run_plan.plan, TokenFile.open

    def count_plan(recipe):
        found["plans"] += 1
        return plan(recipe)

    def count_file(path):
        found[path.name] += 1
        return opened(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_plan, "plan", count_plan)
        patch.setattr(TokenFile, "open", count_file)
        yield found


def recipe(folder, **changes):
    tokens, held_out = write_tokens(folder / "tokens"), write_tokens(folder / "held-out", count=500, seed=1)
    evaluation = {"tokens": str(held_out), "samples": 3}
    return tiny_recipe(folder / "run", tokens, steps=2, evaluation=evaluation, **changes)


ONCE = {"plans": 1, "tokens": 1, "held-out": 1}


def counted_rank(raw):
    with counted() as found:
        run_recipe(raw)
    return found


def test_a_run_in_this_process_or_a_rank_makes_its_plan_and_opens_its_data_once(tmp_path):
    raw = recipe(tmp_path)
    with counted() as found:
        assert run(parse_recipe(raw), quiet=True) == 0
    assert found == ONCE
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    assert json.loads((status_folder(tmp_path / "run") / "rank0.json").read_text())["code"] == 0
    of_two = raw | {"out": str(tmp_path / "of two"), "layout": {"data": 2}}
    assert run_parallel(counted_rank, 2, of_two) == [ONCE, ONCE]


def test_the_process_that_starts_ranks_checks_once_and_hands_the_file_on(tmp_path, monkeypatch):
    file, started = write_recipe(tmp_path / "recipe.toml", recipe(tmp_path)), []

    def launch(words, world, status, *, lock):
        started.append((words, world, status))
        return 75

    monkeypatch.setattr(supervised, "launch", launch)
    with counted() as found:
        assert run(file, ["layout.data=2", "steps=3"], ranks=2, quiet=True) == 75
    words = ["train", str(file), "layout.data=2", "steps=3", "--quiet"]
    assert started == [(words, 2, status_folder(tmp_path / "run"))]
    assert found == ONCE


def steer(raw, name, after):
    """Run the recipe, and let rank 0's folder get the file after so many steps; return how the run ended."""
    trainer = trainer_of(raw)

    def touch(metrics):
        if metrics.step == after and trainer.state.rank == 0:
            (Path(raw["out"]) / name).touch()

    try:
        trainer.run(touch)
    except (Preempted, Killed) as error:
        return f"{error.exit_code}: {error}"
    return "finished"


def saved(raw):
    folder = Path(raw["out"]) / "checkpoints"
    return [path.name for path in complete_checkpoints(folder)] if folder.exists() else []


def steered(folder, **changes):
    return tiny_recipe(folder / "run", write_tokens(folder / "tokens"), **changes)


STOPPED = "75: asked to stop: saved after step 3; the same command goes on from there"


@pytest.mark.parametrize(
    ("name", "world", "said", "steps"),
    [
        pytest.param("stop", 1, STOPPED, [3], marks=pytest.mark.slow),
        ("stop", 2, STOPPED, [3]),
        ("save", 1, "finished", [3, 6]),
        ("kill", 2, "3: ended after step 3 by the file {}", []),
    ],
)
def test_a_file_steers_all_ranks_after_the_step_at_hand_and_what_stops_goes_on_bitwise(
    name, world, said, steps, tmp_path
):
    """To stop is to save first; to save is to go on afterwards; to kill is to leave no checkpoint."""
    raw, file = steered(tmp_path, layout={"data": world}), tmp_path / "run" / name
    assert run_parallel(steer, world, raw, name, 1) == [said.format(file)] * world
    assert saved(raw) == [f"step-{step:08d}" for step in steps] and not file.exists()
    if name == "stop":
        train(raw)
        train(raw | {"out": str(tmp_path / "whole")})
        assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_file_from_before_the_start_does_nothing(tmp_path):
    raw = steered(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("stop", "save", "kill"):
        (tmp_path / "run" / name).touch()
    train(raw)
    assert saved(raw) == ["step-00000006"]
    assert {path.name for path in (tmp_path / "run").iterdir()}.isdisjoint({"stop", "save", "kill"})


def test_on_a_busy_cpu_the_first_line_says_what_to_do(monkeypatch):
    monkeypatch.setattr(launch.os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    monkeypatch.setattr(launch, "usable_cores", lambda: 2)
    for threads, words in (
        (1, ""),
        (2, " (load 9.0 on 2 cores: OMP_NUM_THREADS=1 may be many times faster)"),
    ):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert launch.device_words("cpu") == f"cpu{words}"


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def now():
    return torch.are_deterministic_algorithms_enabled(), os.environ.get(WORKSPACE)


@pytest.mark.parametrize(
    ("choice", "theirs", "during"),
    [
        ([], None, (False, None)),
        (["deterministic=true"], None, (True, ":4096:8")),
        (["deterministic=true"], ":16:8", (True, ":16:8")),
    ],
    ids=["not asked for", "asked for", "with the user's own workspace"],
)
def test_deterministic_mode_covers_build_to_end(choice, theirs, during, tmp_path, monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    if theirs is not None:
        monkeypatch.setenv(WORKSPACE, theirs)
    seen, begin, step = [], Trainer.__init__, Step.launch

    def watched_begin(self, *given, **named):
        seen.append(now())
        begin(self, *given, **named)

    def watched_step(self, *given, **named):
        seen.append(now())
        return step(self, *given, **named)

    monkeypatch.setattr(Trainer, "__init__", watched_begin)
    monkeypatch.setattr(Step, "launch", watched_step)
    raw = tiny_recipe(tmp_path / "run", write_tokens(tmp_path / "tokens"), steps=1)
    assert run(parse_recipe(raw), choice, quiet=True) == 0
    assert seen == [during, during]
    assert now() == (False, theirs)


def test_an_error_ends_deterministic_mode_too(monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(KeyError), deterministic(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            raise KeyError
        assert torch.is_deterministic_algorithms_warn_only_enabled() and WORKSPACE not in os.environ
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_step_s_random_numbers_agree_on_a_tensor_group_alone():
    layout = Layout.of(tensor=2, data=2, data_replicate=2, zero=1, pipeline=2, context=2)
    seeds = {}
    for rank in range(layout.world):
        state = ParallelState.stand_in(layout, rank)
        place = (state.data_index, state.context.index, state.at.pipeline)
        seeds.setdefault(place, set()).add(random_seed(3, 5, state))
    assert len(seeds) == layout.world // 2
    assert all(len(alike) == 1 for alike in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds)
    assert len({random_seed(seed, step, state) for seed in range(5) for step in range(5)}) == 25
