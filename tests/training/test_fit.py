"""``trilith train --fit``: the ranks that are left go on in a layout that the planner chooses; one curve."""

import os
from pathlib import Path

import pytest
from support.configs import TINY_LLAMA
from support.short_runs import tiny_recipe, train, write_recipe
from support.stop_and_go import ROUNDING, differences
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.planner.search import fit
from trilith.recipes import parse_recipe
from trilith.runs.events import read_events
from trilith.system.process_end import leave
from trilith.testing import run_fresh

FOUR = {"tensor": 2, "data": 2, "zero": 1}


def recipe(folder, rows=8, **changes):
    sizes = {"data": {"global_batch": rows}, "model": {"config": {**TINY_LLAMA, "num_hidden_layers": 2}}}
    return tiny_recipe(folder / "run", folder / "tokens", layout=FOUR, **sizes, **changes)


def written(folder, rows):
    """Write tokens and a recipe for four ranks; return the recipe's file."""
    write_tokens(folder / "tokens")
    return write_recipe(folder / "recipe.toml", recipe(folder, rows))


def go_on(file):
    """Train, and note which checkpoints there were when this rank ended."""
    number, folder = os.environ["RANK"], Path(file).parent
    code = run(["train", file, "--fit"])
    there = [path.name for path in (folder / "run" / "checkpoints").iterdir()]
    (folder / f"ended-{number}").write_text(" ".join(there))
    leave(code)


def fitted(file, ranks):
    return run_fresh(go_on, ranks, str(file), process_group=False, timeout=90)


@pytest.mark.parametrize(
    ("rows", "ranks", "used"),
    [
        pytest.param(8, 2, 2, id="4-to-2", marks=pytest.mark.slow),
        pytest.param(12, 3, 3, id="4-to-3", marks=pytest.mark.slow),
        pytest.param(8, 3, 2, id="4-to-3-of-which-one-waits"),
    ],
)
def test_the_ranks_that_are_left_go_on_as_if_none_had_been_lost(rows, ranks, used, tmp_path):
    file = written(tmp_path, rows)
    train(recipe(tmp_path, rows) | {"stop_after": 3})
    codes = fitted(file, ranks)
    assert codes == [0] * ranks, [code.output for code in codes]
    train(recipe(tmp_path, rows) | {"out": str(tmp_path / "whole"), "layout": {}})
    assert differences(tmp_path / "whole", tmp_path / "run", relative=ROUNDING) == []
    (resumed,) = [one for one in read_events(tmp_path / "run" / "events.jsonl") if one["event"] == "resumed"]
    line = resumed["fitted"]
    assert line.startswith(f"fit: ranks here: {ranks}, in the recipe: 4: ")
    assert codes[0].output.count(line) == 1 and line not in codes[-1].output
    assert resumed["world"] == used and ("ranks that wait: 1" in line) == (used < ranks)
    for rank in range(ranks):
        assert "step-00000006" in (tmp_path / f"ended-{rank}").read_text(), "a rank did not wait for the end"


def test_the_layout_is_legal_and_only_what_leaves_the_curve_alone_is_changed(tmp_path):
    """And ranks to trace that may be lost."""
    write_tokens(tmp_path / "tokens")
    before = parse_recipe(recipe(tmp_path, 12))
    for ranks in (1, 3, 6):
        after, line = fit(before, ranks)
        assert after.layout.world == ranks and "by the plan the fastest of" in line
        same = {"layout_section": before.layout_section, "memory": before.memory}
        same["data"] = after.data.model_copy(update={"micro_batch": before.data.micro_batch})
        assert after.model_copy(update=same) == before
    watch = fit(
        parse_recipe(recipe(tmp_path, watch={"trace_steps": [2], "trace_ranks": [3], "norms": 2})), 2
    )[0].watch
    assert (watch.trace_steps, watch.norms) == ([2], 2) and 3 not in watch.trace_ranks
    assert fit(before, 4) == (before, "fit: ranks here: 4, in the recipe: 4: the recipe's own layout")


def test_a_layout_for_two_of_three_local_ranks_is_started_here(tmp_path):
    """Without a launcher, --nproc says how many ranks are left, and only those that are used are started."""
    file = written(tmp_path, 8)
    started = []

    def launch(words, world, *_, **__):
        started.append((words, world))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trilith.training.supervised.launch", launch)
        assert run(["train", str(file), "--fit", "--nproc", "3"]) == 0
    assert started == [(["train", str(file), "--fit"], 2)]
