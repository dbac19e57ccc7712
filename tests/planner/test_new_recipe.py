"""`trilith new`: what it writes passes the dry run, says what its keys mean, and asks on a terminal alone."""

import pytest
from support.command_lines import call_command
from support.configs import TINY_LLAMA
from support.refusals import Refused, refusals
from trilith.cli.app import run
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.recipes.recipe import load_recipe


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
    refused(
        "hf --data none",
        "none: expected a token file, found no none.json.*: trilith tokenize TEXT",
    ),
    refused(
        "hf --data hf",
        "hf: expected a token file, found a folder.*: trilith tokenize hf ",
    ),
    refused("gpt22 --data tokens", "gpt22: expected Hugging Face folder, or published size.*Nearest: gpt2"),
    refused("hf --data tokens --sequence-length 5000", "sequence_length|at least 5,001"),
)
