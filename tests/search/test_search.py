"""A search finds legal layouts that fit, the fastest first, and says why the others fall."""

import json
import re
from pathlib import Path

import pytest
from trilith.cli.app import run
from trilith.parallel_state import BadInput
from trilith.planner.time import machine_named
from trilith.planner.time.stage_timer import StageTimer
from trilith.recipes import load_recipe
from trilith.search import Choice, find_layouts, read_request
from trilith.search.bound import Bound
from trilith.search.candidates import candidates
from trilith.search.critical_batch import critical_batch
from trilith.search.evaluate import Evaluator
from trilith.search.page import make_page
from trilith.search.report import recipe_toml
from trilith.search.tally import Tally
from trilith.training.dry_run import dry_run, heaviest
from trilith.training.run_plan import plan

MACHINE = machine_named("l40s", gpus_per_node=2)


@pytest.fixture(scope="module")
def found():
    """Search for a model of 1.2 billion parameters on four GPUs of 48 GB, two a node."""
    return find_layouts(read_request("llama-3.2-1b", MACHINE, 4, sequence_length=4096, global_batch=8))


def test_the_ten_best_are_in_order_fit_and_are_accepted_as_recipes(found, tmp_path):
    seconds = [one.time.seconds for one in found.best]
    assert seconds == sorted(seconds) and 1 < len(seconds) <= 10
    assert len({one.choice.cut for one in found.best}) == len(found.best)
    assert all(one.bytes <= found.request.room for one in found.best)
    (tmp_path / "recipe.toml").write_text(recipe_toml(found))
    recipe = load_recipe(tmp_path / "recipe.toml")
    planned = dry_run(recipe)
    planned.check("recipe.toml")
    assert planned.ranks == 4 and planned.rank.total == found.best[0].bytes


def test_no_layout_is_faster_than_the_best_or_than_its_bound(found):
    """Time each legal layout with one row a micro-batch, without recomputation or with all of it."""
    evaluator = Evaluator(found.request)
    bound, fastest, seen = Bound(evaluator), found.best[0].time.seconds, 0
    for cut in candidates(found.request, Tally()):
        for flow in cut.flows:
            for mode in {flow.modes[0], flow.modes[-1]}:
                if flow.micro_batch > 1:
                    continue
                choice = cut.choice(flow, mode, cut.stores[-1])
                answer = evaluator.answer(choice)
                assert max(bound.of_cut(cut), bound.of_choice(choice)) <= answer.time.seconds, choice
                if answer.bytes <= found.request.room:
                    assert answer.time.seconds >= fastest, choice
                seen += 1
    assert seen > 50


def test_memory_is_that_of_a_dry_run(found):
    from trilith.search.choice import recipe_of

    for answer in found.best[:4]:
        recipe = recipe_of(found.request, answer.choice)
        assert heaviest(recipe, plan(recipe)).total == answer.bytes


def test_every_layout_is_accounted_for(found):
    counted = sum(one.layouts for one in found.tally if one.kind in ("memory", "slower"))
    assert counted + len(found.best) == found.legal == found.settled


def test_a_refused_layout_is_told_by_its_key_and_what_was_expected(found):
    refused = [one for one in found.tally if one.kind == "not legal"]
    assert refused
    for one in refused:
        assert one.example.startswith("expected ") and one.text not in one.example.split(", found")[0], one


def test_few_layouts_are_timed_and_stages_alike_are_priced_once(monkeypatch):
    priced, exact = list[object](), list[object]()
    of_stage, of_choice = StageTimer._of_stage, Bound.of_choice
    monkeypatch.setattr(
        StageTimer, "_of_stage", lambda self, *given: (priced.append(self), of_stage(self, *given))[1]
    )
    monkeypatch.setattr(
        Bound, "of_choice", lambda self, choice: (exact.append(choice), of_choice(self, choice))[1]
    )
    found = find_layouts(read_request("llama-3.2-1b", MACHINE, 4, sequence_length=4096, global_batch=8))
    assert 20 * len(found.timed) < found.legal and 2 * len(priced) < found.legal
    assert 2 * len(exact) < found.legal and len(set(exact)) == len(exact)


def test_a_reason_names_the_rank_the_figures_and_the_largest_part():
    found = find_layouts(
        read_request("llama-3.2-1b", MACHINE, 4, sequence_length=4096, global_batch=8, headroom=0.7)
    )
    memory = [one for one in found.tally if one.kind == "memory"]
    assert memory
    for one in memory:
        needs = re.match(r"pipeline rank \d+ needs ([\d.]+) of ([\d.]+) GB: ", one.example)
        assert needs and float(needs[1]) > float(needs[2]) == pytest.approx(found.request.room / 1e9)
        assert f": {one.text} " in one.example


def test_the_page_is_whole_and_has_no_address(found):
    page = make_page(found)
    assert page.startswith("<!DOCTYPE html>") and page.count("<svg") == 2
    assert page.count("http://") == page.count("http://www.w3.org") and "https://" not in page
    assert "Why the others fall" in page and "prefers-color-scheme: dark" in page


def test_refusals_are_one_line_and_say_what_to_do(capsys):
    for words, told in (
        (["llama-3.1-405", "--gpus", "8"], "llama-3.1-405b"),
        (["llama-3.2-1b"], "--gpus"),
        (["llama-3.2-1b", "--gpus", "8", "--gpu", "h1000"], "h100-80gb"),
        (["llama-3.2-1b", "--gpus", "17", "--global-batch", "8", "--seq", "64"], "--gpus"),
    ):
        assert run(["plan", *words]) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1


def test_a_model_that_does_not_fit_says_what_would(capsys):
    words = ["llama-3.1-8b", "--gpus", "1", "--gpu", "rtx-4090", "--seq", "1024", "--global-batch", "4"]
    assert run(["plan", *words, "--headroom", "0.85"]) == 2
    error = capsys.readouterr().err
    assert "of 3.6 GB" in error and "What would fit: --gpu" in error


def test_the_command_prints_json(capsys):
    words = ["plan", "llama-3.2-1b", "--gpus", "1", "--seq", "1024", "--global-batch", "4", "--json"]
    assert run(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layouts"][0]["seconds"] > 0 and told["gpus"] == 1 and len(told["strategy"]) == 2


def test_several_numbers_of_gpus_and_rows_are_a_table(capsys):
    words = ["plan", "llama-3.2-1b", "--gpus", "1,2", "--seq", "512,1024", "--global-batch", "4", "--json"]
    assert run(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["gpus"] for one in told] == [1, 1, 2, 2]
    assert run(words[:-1]) == 0
    shown = capsys.readouterr().out
    assert "tokens" in shown and "of a row" in shown and shown.count("1,024") >= 2
    assert run([*words[:-1], "--write", "recipe.toml"]) == 2 and not Path("recipe.toml").exists()


def test_generation_lists_layouts_by_the_rows_that_fit(capsys):
    words = ["plan", "llama-3.2-1b", "--gpus", "2", "--gpu", "l40s", "--seq", "2048", "--generate"]
    assert run([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {(one["tensor"], one["pipeline"]) for one in told} == {(1, 2), (2, 1)}
    rows = [one["rows_that_fit"] for one in told]
    assert rows == sorted(rows, reverse=True) and rows[-1] > 16 and told[0]["rows"] == 16
    assert run(words) == 0
    first, *shown = capsys.readouterr().out.splitlines()
    assert first.startswith("llama-3.2-1b on l40s") and "GB of the rank that needs most" in first
    assert "bfloat16" in first and "a GPU may hold 44.2 GB" in first and "reading" in "".join(shown)
    assert run([*words, "--write", "recipe.toml"]) == 2 and not Path("recipe.toml").exists()
    assert run([*words, "--headroom", "0.9", "--dtype", "float32"]) == 2
    assert "Take more --gpus" in capsys.readouterr().err


def test_the_page_of_several_searches_is_a_chart(tmp_path):
    page = tmp_path / "plan.html"
    words = ["plan", "llama-3.2-1b", "--gpus", "1,2", "--seq", "512", "--global-batch", "4"]
    assert run([*words, "--html", str(page)]) == 0
    assert page.read_text().count("<svg") == 1


def test_adapters_fit_where_the_whole_model_cannot_be_trained(capsys):
    # So many rows do not fit in one micro-batch; several micro-batches need gradients in whole.
    words = ["plan", "llama-3.1-8b", "--gpus", "1", "--gpu", "l40s", "--seq", "1024", "--global-batch", "64"]
    assert run([*words, "--json"]) == 2
    capsys.readouterr()
    assert run([*words, "--lora", "16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layouts"][0]["bytes"] < 48e9


BENCH = {
    "machine": {"device": "cpu", "gpus": 0, "processor": "a CPU", "cores": 2, "ranks": 2,
                "memory": 8 * 2**30},
    "rows": [
        {"part": "speed", "status": "done", "figures": {
            "matmul, bf16: TFLOP/s": 0.02, "matmul, fp32: TFLOP/s": 0.05,
            "attention, bf16: TFLOP/s": 0.01, "attention, fp32: TFLOP/s": 0.025,
            "module, forward and backward: us": 12.6, "copy: GB/s read and written": 10.0,
            "module, checkpointing full: us": 25.0, "module, checkpointing selective: us": 60.0,
        }},
        {"part": "links", "status": "done", "figures": {
            "all-reduce: GB/s": 2.0, "all-gather: GB/s": 1.0, "reduce-scatter: GB/s": 0.5,
            "all-reduce of 4 KiB: us": 100.0,
            "all-reduce of a block: GB/s": 1.0, "all-reduce of a tiny block: us": 300.0,
            "all-gather of a block: GB/s": 0.5, "all-gather of a tiny block: us": 400.0,
            "reduce-scatter of a block: GB/s": 0.25, "reduce-scatter of a tiny block: us": 0.0,
            **{f"{name}, checkpointing {mode}: us": 150.0 for mode in ("none", "full", "selective")
               for name in ("collective in a block", "exchange around a ring")},
        }},
    ],
}  # fmt: skip


def test_a_plan_for_a_measured_cpu_is_a_recipe_for_it(tmp_path, capsys):
    (tmp_path / "bench.json").write_text(json.dumps(BENCH))
    words = ["smollm2-135m", "--gpus", "2", "--seq", "512", "--global-batch", "8", "--json"]
    recipe = tmp_path / "recipe.toml"
    assert run(["plan", *words, "--machine", str(tmp_path / "bench.json"), "--write", str(recipe)]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["seconds"] > 0
    written = load_recipe(recipe)
    assert (written.device, written.compute, written.layout.world) == ("cpu", None, 2)
    (tmp_path / "bench.json").write_text("{}")
    assert run(["plan", *words, "--machine", str(tmp_path / "bench.json")]) == 2


def test_the_critical_batch_follows_from_the_loss():
    """At a loss of 1 nat it is 2e8 tokens (Kaplan et al. 2020), and at a higher loss less."""
    assert 1e6 < critical_batch(1e9, 2e10) < critical_batch(4e11, 1.5e13) < 2e8


def test_a_choice_says_itself_in_the_words_of_a_recipe(found):
    best = found.best[0].choice
    assert isinstance(best, Choice) and f"micro_batch {best.micro_batch}" in str(best)
    with pytest.raises(BadInput, match="published size"):
        read_request("no-such-model", MACHINE, 4)
