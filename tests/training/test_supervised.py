"""``training.run``: a run with all that surrounds it; each process makes its plan and opens its data once."""

import json
from collections import Counter
from contextlib import contextmanager

import pytest
from support.short_runs import run_recipe, tiny_recipe
from trilith.data import TokenFile
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput
from trilith.recipes import parse_recipe
from trilith.recipes.foreign.translation import to_toml
from trilith.runs.heartbeat import status_folder
from trilith.runs.metrics import read_metrics
from trilith.testing import run_parallel
from trilith.training import check_run, run, run_plan, supervised


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


def test_a_run_in_this_process_makes_its_plan_and_opens_its_data_once(tmp_path):
    raw = recipe(tmp_path)
    with counted() as found:
        assert run(parse_recipe(raw), quiet=True) == 0
    assert found == ONCE
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    assert json.loads((status_folder(tmp_path / "run") / "rank0.json").read_text())["code"] == 0


def counted_rank(raw):
    with counted() as found:
        run_recipe(raw)
    return found


def test_each_rank_makes_its_plan_and_opens_its_data_once(tmp_path):
    raw = recipe(tmp_path, layout={"data": 2})
    assert run_parallel(counted_rank, 2, raw) == [ONCE, ONCE]


def test_the_process_that_starts_ranks_checks_once_and_hands_the_file_on(tmp_path, monkeypatch):
    file, started = tmp_path / "recipe.toml", []
    file.write_text("".join(f"{key} = {to_toml(value)}\n" for key, value in recipe(tmp_path).items()))

    def launch(words, world, status, *, lock):
        started.append((words, world, status))
        return 75

    monkeypatch.setattr(supervised, "launch", launch)
    with counted() as found:
        assert run(file, ["layout.data=2", "steps=3"], ranks=2, quiet=True) == 75
    words = ["train", str(file), "layout.data=2", "steps=3", "--quiet"]
    assert started == [(words, 2, status_folder(tmp_path / "run"))]
    assert found == ONCE


def test_a_recipe_without_a_file_starts_no_ranks(tmp_path):
    with pytest.raises(BadInput, match=r"a file, which the 2 ranks can read.*torchrun"):
        run(parse_recipe(recipe(tmp_path, layout={"tensor": 2})))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["data", "evaluation"])
def test_a_check_refuses_token_files_of_more_ids_than_the_model_has(tmp_path, key):
    many = write_tokens(tmp_path / "many", vocab_size=500)
    raw = recipe(tmp_path)
    raw[key] |= {"tokens": str(many)}
    with pytest.raises(BadInput, match=rf"{key}\.tokens: vocab_size: expected at most 131, .* found 500"):
        check_run(parse_recipe(raw))
