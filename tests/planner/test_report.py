"""``trilith plan`` says what was asked and found, as text, JSON, recipe and page; so do shipped recipes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import trilith
from support.command_lines import call_command
from support.configs import TINY_LLAMA
from support.refusals import Refused, refusals
from trilith.cli.app import run
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.models import published_size
from trilith.parallel_state import BadInput
from trilith.planner.dry_run import dry_run
from trilith.planner.memory import MemoryPlan
from trilith.planner.search import Choice, find_layouts, read_request
from trilith.planner.search.report import recipe_head
from trilith.planner.time import MIDDLE_HALF, TIMES_SLOWER, machine_named
from trilith.recipes import load_recipe

SMALL = ["plan", "llama-3.2-1b", "--sequence-length", "1024", "--global-batch", "8"]
GUIDE = (Path(trilith.__path__[0]) / "docs" / "planning.md").read_text()


def told(capsys, *words):
    assert run([*SMALL, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_says_what_it_assumed(capsys):
    """4 Mi tokens a step in rows of the model's length, and the links of the maker's servers."""
    assert run(["plan", "gpt2", "--gpus", "2"]) == 0
    shown = capsys.readouterr().out
    assert "gpt2: steps of 4,096 rows x 1,024 tokens on 2 x h100-80gb, 8 a node, NVLink 450 GB/s in" in shown
    least, usual, most = TIMES_SLOWER
    shown = " ".join(shown.split())
    assert re.search(r"MFU [\d.]+% of 989 TFLOP/s a GPU if the causal half .* [\d.]+% if all", shown)
    assert f"took {least} to {most} times as long as predicted, in the median {usual} times" in shown
    pairs = re.search(r"(\S+) to (\S+) s, (\S+) to (\S+) tokens/s, MFU (\S+)% to (\S+)%", shown)
    assert pairs
    low, high = ([float(number.replace(",", "")) for number in pairs.groups()[place::2]] for place in (0, 1))
    for fewest, greatest in zip(low, high, strict=True):
        assert greatest / fewest == pytest.approx(MIDDLE_HALF[1] / MIDDLE_HALF[0], rel=0.02)
    one = told(capsys, "--gpus", "2", "--gpus-per-node", "1")
    assert one["times_slower"] == {"least": least, "median": usual, "most": most}
    asked = {"gpus": 2, "gpus_per_node": 1, "machine": "h100-80gb", "sequence_length": 1024}
    assert (asked | {"global_batch": 8}).items() <= one.items()


def test_a_measured_machine_is_not_compared_with_published_runs(capsys, monkeypatch):
    measured = replace(machine_named("h100-80gb"), name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("trilith.planner.time.machine_from_bench", lambda path, **options: measured)
    assert "times_slower" not in told(capsys, "--gpus", "2", "--machine", "bench.json")


def test_a_training_has_days_hours_a_price_and_energy_worked_out_by_hand(capsys):
    one = told(capsys, "--gpus", "2", "--tokens", "3B", "--price", "2.50", "--watts", "500")
    rate, training = one["layouts"][0]["tokens_per_second"], one["training"]
    hours = 3e9 / rate / 3600 * 2
    assert training == {
        "tokens": 3e9,
        "days": pytest.approx(3e9 / rate / 86400),
        "gpu_hours": pytest.approx(hours),
        "cost": pytest.approx(2.5 * hours),
        "kilowatt_hours": pytest.approx(hours / 2),
    }
    assert run([*SMALL, "--gpus", "2", "--tokens", "3B", "--price", "2.50", "--watts", "500"]) == 0
    shown = capsys.readouterr().out
    assert f"{hours:,.0f} GPU-hours, {2.5 * hours:,.0f} at 2.5 a GPU-hour, {hours / 2:,.0f} kWh" in shown
    assert "training" not in told(capsys, "--gpus", "2")


def keys_of(value):
    """Return the keys of nested objects, without those of the objects that have a key for each name."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if not isinstance(value, dict):
        return set()
    named = {"recipe", "parts", "bytes_of_pipeline_ranks"}
    return set(value).union(*(keys_of(one) for key, one in value.items() if key not in named))


def test_of_two_instants_the_worse_one_counts_by_its_own_name():
    for (loss, backward), name in {(3, 2): "logits", (2, 3): "one block's backward"}.items():
        plan = MemoryPlan(weights=4, logits=loss, block=backward)
        assert {kind: size for kind, size in plan.parts(1).items() if size} == {
            "weights": 4, name: 3, "runtime": 1,
        }  # fmt: skip
        assert plan.total == 7


def test_every_key_of_the_json_is_in_the_guide_and_no_other(capsys):
    one = told(capsys, "--gpus", "2", "--tokens", "3B")
    several = told(capsys, "--gpus", "1,17")
    assert [len(two["layouts"]) for two in several] == [1, 0] and "Nearest" in several[1]["error"]
    generation = told(capsys, "--gpus", "2", "--generate")
    part = GUIDE.partition("\n## The result for programs\n")[2].partition("\n## ")[0]
    listed = [
        re.findall(r"`(\w+)`", line.split("|")[1]) for line in part.splitlines() if line.startswith("| `")
    ]
    assert keys_of([one, several, generation]) == {key for line in listed for key in line}
    layout = one["layouts"][0]
    assert layout["bytes"] == max(sum(kinds.values()) for kinds in layout["bytes_of_pipeline_ranks"])
    assert sum(layout["parts"].values()) == pytest.approx(layout["seconds"])
    assert 0 < layout["mfu"]["causal"] < layout["mfu"]["full"]


def test_a_sweep_goes_on_where_one_point_has_no_layout(capsys, tmp_path, monkeypatch):
    page = tmp_path / "sweep.html"
    words = ["--gpus", "1,17,2", "--tokens", "3B", "--price", "2", "--html", str(page)]
    monkeypatch.setenv("COLUMNS", "60")  # no number is cut where a terminal is narrower than the table
    assert run([*SMALL, *words]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert page.read_text().count("<svg") == 1
    for text in (shown, page.read_text()):
        assert "GPU-hours" in text and "cost" in text and "none: 17" in text
        assert "llama-3.2-1b on h100-80gb, 8 a node, NVLink" in text and "between nodes" in text
        assert "Nearest legal data.global_batch" in text


def test_a_sweep_shows_the_warnings_of_its_layouts(capsys):
    words = "plan llama-3.1-8b --gpus 2 --gpu-type rtx-4090 --sequence-length 512,1024 --global-batch 4"
    assert run(words.split()) == 0
    lines = [one for one in capsys.readouterr().out.splitlines() if one.startswith("warning")]
    assert lines and all("2 GPUs with" in one for one in lines)
    assert any("offload needs" in one and "512 tokens of a row" in one for one in lines)


def test_a_gpu_s_name_may_be_in_capitals_and_a_number_stand_twice(capsys):
    assert [row["gpus"] for row in told(capsys, "--gpus", "2,1,2", "--gpu-type", "H100-80GB")] == [2, 1]


@pytest.mark.parametrize("name", ["config.json", "llama.json"])
def test_adapters_are_planned_from_a_config_without_weights(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / name).write_text(json.dumps(published_size("llama-3.2-1b").fields))
    words = [f"llama/{name}", "--gpus", "1", "--lora", "8", "--sequence-length", "512", "--global-batch", "4"]
    assert run(["plan", *words, "--write", "recipe.toml"]) == 0
    capsys.readouterr()
    assert load_recipe(tmp_path / "recipe.toml").lora is not None
    assert run(["train", "recipe.toml", "--dry-run"]) == 0 and "fits " in capsys.readouterr().out


def test_a_recipe_of_a_short_step_states_its_seconds(tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    assert run([*SMALL, "--gpus", "8", "--write", str(recipe)]) == 0
    capsys.readouterr()
    seconds = re.search(r"# Predicted: (\S+) s a step", recipe.read_text())
    assert seconds and len(seconds[1].lstrip("0.")) >= 3


NAME = "llama-3.1-405b-16384gpus"

QUICK = ("llama-3.2-1b-1gpu", "lora-llama-3.1-8b-1gpu", "llama-3.2-1b-8gpus")
SLOW = ("llama-3.1-8b-8gpus", "lora-llama-3.1-70b-8gpus", "llama-3.1-70b-64gpus", "gpt3-175b-1024gpus", NAME)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_recipe_is_what_the_search_finds_and_its_header_says_so(name):
    text, recipe = (Path(trilith.__path__[0]) / "recipes" / f"{name}.toml").read_text(), load_recipe(name)
    found = find_layouts(read_request(name, machine_named("h100-80gb"), None))
    memory, layout = recipe.memory, recipe.layout
    own = Choice(layout, recipe.layout_section.schedule, recipe.data.micro_batch, memory.checkpointing)
    assert str(found.best[0].choice) == str(own)
    assert dry_run(recipe).rank.total == found.best[0].bytes
    _, *predicted = recipe_head(found).splitlines()
    assert predicted and all(line in text for line in predicted)


FIND = "search.find.find_layouts"


@pytest.mark.parametrize(
    ("words", "computes", "begins"),
    [
        ([*SMALL, "--gpus", "2"], FIND, "llama-3.2-1b: steps of 8 rows x 1,024 tokens on 2"),
        ([*SMALL, "--gpus", "1,2"], FIND, "llama-3.2-1b on h100-80gb, 8 a node"),
        (["train", "llama-3.1-8b-8gpus", "--dry-run"], "dry_run.dry_run", "layout         data 8, zero 3"),
    ],
)
def test_the_first_line_is_there_before_what_takes_seconds(words, computes, begins, monkeypatch, capsys):
    def refuse(*args, **options):
        raise BadInput("plan", "a search", expected="none", found="some")

    monkeypatch.setattr(f"trilith.planner.{computes}", refuse)
    assert run(words) == 2
    assert capsys.readouterr().out.startswith(begins)


def write_inputs(folder):
    write_hf_folder(folder / "hf", {**TINY_LLAMA, "vocab_size": 300})
    write_tokens(folder / "tokens")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Stand in a folder with a model and a token file."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_it_says_to_type_next_can_be_typed(folder, capsys):
    assert run(["new", "--model", "hf", "--data", "tokens", "--gpus", "1", "--out", "my é.toml"]) == 0
    printed = capsys.readouterr().out
    assert "next: trilith train 'my é.toml' --dry-run\n      trilith train 'my é.toml'\n" in printed


@pytest.mark.parametrize(
    "words", [("hf", "2"), ("hf", "1", "--lora", "4"), ("smollm2-135m", "8"), ("hf/config.json", "1")]
)
def test_the_recipe_passes_a_dry_run(folder, words, capsys):
    model, gpus, *options = words
    assert run(["new", "--model", model, "--data", "tokens", "--gpus", gpus, *options]) == 0
    assert "next: trilith train recipe.toml --dry-run" in capsys.readouterr().out
    assert run(["train", "recipe.toml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("fits ") and "not here" not in shown
    recipe = load_recipe("recipe.toml")
    assert recipe.device == "cuda" and recipe.layout.world == int(gpus)
    assert (recipe.model.init_from == "hf") is (model == "hf")


def test_each_key_has_a_comment_and_the_numbers_follow_the_tokens(folder):
    words = ["new", "--model", "hf", "--data", "tokens", "--gpus", "2", "--sequence-length", "16"]
    assert run([*words, "--global-batch", "4"]) == 0
    text = (folder / "recipe.toml").read_text()
    settings = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
    assert settings and all("  # " in line for line in settings), text
    assert "chosen by `trilith plan`" in text.splitlines()[0]
    recipe = load_recipe("recipe.toml")
    assert recipe.steps == 4000 // (16 * 4) and recipe.data.global_batch == 4


def refused(words, says):
    words = ["new", "--gpus", "1", "--model", *words.split()]
    return Refused(" ".join(words), lambda folder: call_command(folder, *words), says, given=write_inputs)


test_what_cannot_be_is_refused = refusals(
    refused("hf --data none", "none: expected a token file, found no none.json.*: trilith tokenize TEXT"),
    refused("hf --data hf", "hf: expected a token file, found a folder.*: trilith tokenize hf "),
    refused("gpt22 --data tokens", "gpt22: expected Hugging Face folder, or published size.*Nearest: gpt2"),
    refused("hf --data tokens --sequence-length 5000", "sequence_length|at least 5,001"),
)
