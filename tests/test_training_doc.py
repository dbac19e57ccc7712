"""The tables of docs/training.md are the recipe's keys, with their defaults and what the code says."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel
from support.configs import TINY_LLAMA
from support.short_runs import tiny_recipe
from trilith.cli.app import COMMANDS
from trilith.machine.random_files import write_tokens
from trilith.recipes import Recipe, optimizer_sections, sections, watch_section
from trilith.recipes.recipe import parse_recipe
from trilith.recipes.reference import SECTIONS, TABLE, reference, table
from trilith.runs.metrics import read_metrics

DOC = Path(__file__).parents[1] / "docs" / "training.md"
TABLES = TABLE.findall(DOC.read_text())


def test_a_key_that_takes_more_than_words_says_so():
    page = reference()
    assert "; one of `true`, `false`, `auto` |" in page  # compile
    assert "; one of `auto`, a number |" in page  # memory.loss_chunk
    assert "; some of `tensorboard`, `wandb`, `mlflow`, `trackio` |" in page  # watch.trackers, a list


def test_the_reference_has_every_section_and_key():
    assert {model for _, model in SECTIONS} == {
        one
        for file in (sections, optimizer_sections, watch_section)
        for one in (Recipe, *vars(file).values())
        if isinstance(one, type)
        and issubclass(one, BaseModel)
        and one.__name__ not in ("Section", "LoraConfig", "BaseModel")
    }
    assert (DOC.parent / "recipe.md").read_text() == reference(), "run `make docs`"


def test_the_changelog_names_every_command():
    log = (DOC.parents[1] / "CHANGELOG.md").read_text()
    (line,) = re.findall(r"- Commands: (.*?)\.\n", log, re.DOTALL)
    assert set(re.findall(r"`([\w-]+)`", line)) == {one.__name__.replace("_", "-") for one in COMMANDS}


def test_every_section_of_these_has_its_table():
    assert [name for name, _, _ in TABLES] == [
        "Recipe",
        "OptimizerSection",
        "ParameterGroup",
        "SpikeSection",
        "Recipe",
        "LossScaleSection",
    ]


@pytest.mark.parametrize(("name", "keys", "written"), TABLES, ids=[name for name, _, _ in TABLES])
def test_a_table_is_what_the_code_says(name, keys, written):
    (model,) = (one for _, one in SECTIONS if one.__name__ == name)
    assert written == table(model, keys.split()), "run `make docs`"


def test_the_groups_of_the_example_load(tmp_path):
    (block,) = re.findall(r"```toml\n(.*?)```", DOC.read_text(), re.DOTALL)
    raw = tiny_recipe(tmp_path, tmp_path / "tokens", **tomllib.loads(block))
    groups = parse_recipe(raw).optimizer.groups
    assert [(one.lr_scale, one.weight_decay, one.freeze) for one in groups] == [
        (0.1, 0.0, False),
        (1, None, True),
    ]


def test_training_from_python_works_as_shown(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    small = code.replace("steps=1000", "steps=1").replace("layout.tensor=2", "layout.tensor=1")
    assert small.count("=1") == 2 and small != code
    monkeypatch.chdir(tmp_path)
    config = "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_LLAMA.items()) + "}"
    Path("recipe.toml").write_text(
        f'out = "run"\nsteps = 9\n[model]\nconfig = {config}\n'
        f'[data]\ntokens = "{write_tokens(tmp_path / "tokens")}"\nsequence_length = 16\nglobal_batch = 4\n'
    )
    exec(compile(small, "training.md", "exec"), {"__name__": "__main__"})
    assert len(read_metrics(Path("run") / "metrics.jsonl")) == 1
