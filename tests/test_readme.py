"""Check that the README works: its Python runs, its recipe is one, its commands do what they say."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from support.configs import TINY_LLAMA
from support.families import transformers_model
from support.pages import ROOT, Page
from trilith.cli.app import run
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.machine.measure import cases
from trilith.parallel_state import clip_gradients, finalize_gradients
from trilith.recipes.recipe import parse_recipe
from trilith.testing import run_fresh

PAGE = Page.read("README.md")
(RECIPE,) = PAGE.blocks("toml")
CONVERTING = ("convert", "inspect", "parity")
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Make a folder with a small `Llama-3.2-1B`, its tokenizer, and a `corpus.txt`."""
    monkeypatch.chdir(tmp_path)
    train_tokenizer([PAGE.text], tmp_path / "Llama-3.2-1B", vocab_size=400)
    raw = TINY_LLAMA | {"vocab_size": 400, "max_position_embeddings": 2048}
    transformers_model(raw).save_pretrained(tmp_path / "Llama-3.2-1B")
    (tmp_path / "corpus.txt").write_text(PAGE.text * 40, encoding="utf-8")
    return tmp_path


def reuse(page):
    """The block, which prints a number of what it computes, on this world; then a number of a gradient."""
    torch.seed()  # of the process's own, as each that a user starts has
    space = page.run_python()
    model, state, y = (space[name] for name in ("model", "state", "y"))
    assert y.shape == (2, 8, 64) and model.up.weight.requires_grad
    y.square().sum().backward()
    finalize_gradients(model, state=state)
    print(f"{float(clip_gradients(model, 1e9, state=state)):.3f}")


def test_the_layers_work_as_shown_under_torchrun_and_agree(capsys):
    """As written: no process group, and no seed but the page's."""
    reuse(PAGE)
    alone = capsys.readouterr().out.strip()
    assert len(alone.splitlines()) == 2
    for rank in run_fresh(reuse, 2, PAGE, process_group=False):
        assert rank == 0, rank.output
        assert alone in rank.output


def test_the_recipe_is_one():
    assert parse_recipe(tomllib.loads(RECIPE)).layout.world == 1


def test_converting_works_as_shown(place):
    commands = [words for words in PAGE.commands() if words[0] in CONVERTING]
    assert {"convert", "parity"} <= {words[0] for words in commands}
    for words in commands:
        if "titan/step-1000" in words:
            assert run(["convert", "sharded", "titan/step-1000", "--to", "dcp"]) == 0
        assert run(words) == 0, words
    source, again = place / "Llama-3.2-1B", place / "Llama-again"
    assert (source / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert (source / "tokenizer.json").read_bytes() == (again / "tokenizer.json").read_bytes()


def test_training_works_as_shown_at_a_small_size(place, capfd):
    Path("recipe.toml").write_text(RECIPE)
    tokenize, train, resume, report, generate = (
        words for words in PAGE.commands() if words[0] not in CONVERTING
    )
    smaller = ["steps=4", "data.sequence_length=32", "data.global_batch=4"]
    assert run(tokenize) == 0
    assert run([*train, *smaller, "stop_after=2"]) == 0
    # Two ranks, with all processes of a whole start: no other test starts new interpreters this way.
    assert run([*resume, *smaller]) == 0
    printed = capfd.readouterr().out
    assert "resumed from" in printed
    assert "next: trilith report run\n      trilith generate run --prompt" in printed
    assert run(report) == 0 and Path("run/report.html").exists()
    assert run([*generate, "--max-new-tokens", "4"]) == 0
    assert "def main():" in capfd.readouterr().out


# Figures are those of the committed results


def measured(name):
    """Return the rows of a table of results, by name."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return {row["name"]: row.get("figures") or row for row in rows}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_table_of_results_names_its_commit_the_versions_and_the_machine(path):
    facts = json.loads(path.read_text())["machine"]
    assert re.match(r"[0-9a-f]{8}", facts["commit"])
    assert all(facts[key] for key in ("date", "processor", "cores", "python", "trilith", "torch"))
    table = path.with_suffix(".md").read_text()
    assert all(f"\n{key}: {fact}  \n" in table for key, fact in facts.items())


def test_the_figures_of_a_gpu_are_those_of_its_table():
    rows = measured("gpu")
    ours, theirs = rows["Llama 3.2 1B, compiled"], rows["transformers, compiled"]
    speed, share = f"{ours['tokens/s']:,.0f} tokens/s", f"{ours['MFU, causal']:.1%}".replace("%", " %")
    shown = f"compiled: {speed}, {share} MFU, {ours['peak: GB']:.1f} GB; transformers compiled: "
    assert shown + f"{theirs['tokens/s']:,.0f} tokens/s, {theirs['peak: GB']:.1f} GB" in PAGE.text
    page = Page.read("docs/performance.md")
    names = {"trilith, eager": "Llama 3.2 1B, eager", "trilith, `compile = true`": "Llama 3.2 1B, compiled"}
    names["transformers, `torch.compile`, autocast"] = "transformers, compiled"
    table = {row[0]: row[1:] for row in page.rows("Measured on one H100")}
    assert {*names} <= table.keys()
    for name, cells in table.items():
        row = rows[names.get(name, "Llama 3.1 8B, 8 blocks, one row of 8,192")]
        assert cells[:2] == [f"{row['ms a step']:.0f} ms", f"{row['tokens/s']:,.0f}"]
        assert cells[4] == f"{row['peak: GB']:.1f} GB"
        if name.startswith("trilith"):
            mfu = [f"{100 * row[f'MFU, {kind}']:.1f} %" for kind in ("causal", "full")]
            plan = [f"{row['planned: GB']:.1f} GB", f"{row['predicted: ms a step']:.0f} ms"]
            assert cells[2:4] + cells[5:] == mfu + plan


def test_the_figures_of_conversion_and_training_are_those_of_their_tables():
    rows = measured("conversion")
    copied = rows["trilith convert from process start, of cp"]["details"]
    loaded = rows["trilith convert from process start, of transformers' load + save"]["details"]
    ours, copy, theirs = (
        f"{seconds:.1f} s" for seconds in (copied["ours, s"], copied["theirs, s"], loaded["theirs, s"])
    )
    shown = f"took {ours} from process start, `cp` {copy}, and loading and saving with transformers {theirs}"
    assert shown in " ".join(PAGE.text.split()) and "peak RssAnon, 1.71 GB hf -> sharded" in rows
    peaks = [rows[name]["figure"] for name in rows if "RssAnon" in name]
    assert f"does not grow with the model ({max(peaks) / 1e3:.1f} GB at most here)" in PAGE.text
    training = [*measured("training").values()]
    shown = [(f"{row['figure']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}") for row in training]
    cells = Page.read("docs/performance.md").rows("Measured on two CPU cores")
    assert len(cells) == 9 and not [row for row in cells if (row[2], row[3]) not in shown]


def test_the_readme_shows_what_quickstart_prints_and_how_far_predictions_were():
    quickstart = (ROOT / "cli" / "quickstart.py").read_text()
    name, figure = re.search(r"checks such as `(.+?)`: `(.+?)`", PAGE.text).groups()
    assert f'"{name}"' in quickstart and re.fullmatch(r"\d\.\de-\d\d apart over 100 steps", figure)
    (readme,) = re.findall(r"published steps took (\S+) times as long in the median", PAGE.text)
    (page,) = re.findall(r"as predicted, in the median (\S+) times", Page.read("docs/performance.md").text)
    assert readme == page


def test_the_trained_model_has_as_many_parameters_as_the_page_and_the_bench_say():
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        millions = round(LlamaForCausalLM(LlamaConfig(**cases.SMALL)).num_parameters() / 1e6)
    assert f"a Llama of {millions} million parameters" in Page.read("docs/performance.md").text
    assert cases._SIZES["cpu"].name == f"Llama of {millions} M"
