"""Check that the README works: its Python runs, its recipe is one, its commands do what they say."""

import tomllib
from pathlib import Path

import pytest
import torch
from support.configs import TINY_LLAMA
from support.pages import Page
from trilith.cli.app import run
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.parallel_state import clip_gradients, finalize_gradients
from trilith.recipes.recipe import parse_recipe
from trilith.testing import run_fresh

PAGE = Page.read("README.md")
(RECIPE,) = PAGE.blocks("toml")
CONVERTING = ("convert", "inspect", "parity")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Make a folder with a small `Llama-3.2-1B`, its tokenizer, and a `corpus.txt`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    train_tokenizer([PAGE.text], tmp_path / "Llama-3.2-1B", vocab_size=400)
    config = LlamaConfig(**(TINY_LLAMA | {"vocab_size": 400, "max_position_embeddings": 2048}))
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "Llama-3.2-1B")
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
    assert "resumed from" in capfd.readouterr().out
    assert run(report) == 0 and Path("run/report.html").exists()
    assert run([*generate, "--max-new-tokens", "4"]) == 0
    assert "def main():" in capfd.readouterr().out
