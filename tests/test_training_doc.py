"""The tables of docs/training.md are the recipe's keys, with their defaults and what the code says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from trilith.cli.app import COMMANDS
from trilith.recipes import Recipe, sections
from trilith.recipes.recipe import parse_recipe
from trilith.testing.short_runs import tiny_recipe

DOC = Path(__file__).parents[1] / "docs" / "training.md"
TABLES = re.findall(r"<!-- (\w+)(?:: ([\w ]+))? -->\n(.*?)<!-- end -->", DOC.read_text(), re.DOTALL)


def default_of(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    if isinstance(default, BaseModel) or default == ():
        return ""
    if isinstance(default, float) and default >= 2**16:
        return f"2^{default.hex().split('p+')[1]}"
    return (
        "none" if default is None else f"`{str(default).replace('True', 'true').replace('False', 'false')}`"
    )


def choices_of(annotation: Any) -> list[str]:
    """The words that a key may have."""
    found = [str(one) for one in get_args(annotation) if isinstance(one, str)]
    for part in get_args(annotation):
        found += choices_of(part) if get_origin(part) is not None else []
    return found


def table(model: type[BaseModel], keys: list[str]) -> str:
    """The table as the model has it."""
    lines = ["| key | default | |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if keys and name not in keys:
            continue
        assert field.description, f"{model.__name__}.{name} has no description"
        words = ", ".join(f"`{one}`" for one in choices_of(field.annotation))
        said = f"{field.description}{f': {words}' if words else ''}".replace("|", "\\|")
        lines.append(f"| `{name}` | {default_of(field)} | {said} |")
    return "\n".join(lines) + "\n"


SECTIONS = [
    ("The top", Recipe),
    ("[model]", sections.ModelSection),
    ("[lora]", sections.LoraSection),
    ("[layout]", sections.LayoutSection),
    ("[data]", sections.DataSection),
    ("[optimizer]", sections.OptimizerSection),
    ("[[optimizer.groups]]", sections.ParameterGroup),
    ("[optimizer.skip_spikes]", sections.SpikeSection),
    ("[loss_scale]", sections.LossScaleSection),
    ("[experts]", sections.ExpertsSection),
    ("[memory]", sections.MemorySection),
    ("[checkpoint]", sections.CheckpointSection),
    ("[evaluation]", sections.EvaluationSection),
    ("[watch]", sections.WatchSection),
    ("[debug]", sections.DebugSection),
]


def reference() -> str:
    """docs/recipe.md."""
    parts = [
        "# Every key of a recipe\n\nOn the command line: `trilith train recipe.toml section.key=value`.\n"
    ]
    parts += [f"## `{title}`\n\n{table(model, [])}" for title, model in SECTIONS]
    return "\n".join(parts).replace("`The top`", "The top")


def test_the_reference_has_every_section_and_key() -> None:
    assert {model for _, model in SECTIONS} == {
        one
        for one in [Recipe, *vars(sections).values()]
        if isinstance(one, type)
        and issubclass(one, BaseModel)
        and one.__name__ not in ("Section", "LoraConfig", "BaseModel")
    }
    assert (DOC.parent / "recipe.md").read_text() == reference(), f"docs/recipe.md should be:\n{reference()}"


def test_the_changelog_names_every_command() -> None:
    log = (DOC.parents[1] / "CHANGELOG.md").read_text()
    (line,) = re.findall(r"- Commands: (.*?)\.\n", log, re.DOTALL)
    assert set(re.findall(r"`([\w-]+)`", line)) == {one.__name__.replace("_", "-") for one in COMMANDS}


def test_every_section_of_these_has_its_table() -> None:
    assert [name for name, _, _ in TABLES] == [
        "Recipe",
        "OptimizerSection",
        "ParameterGroup",
        "SpikeSection",
        "Recipe",
        "LossScaleSection",
    ]


@pytest.mark.parametrize(("name", "keys", "written"), TABLES, ids=[name for name, _, _ in TABLES])
def test_a_table_is_what_the_code_says(name: str, keys: str, written: str) -> None:
    model = Recipe if name == "Recipe" else getattr(sections, name)
    assert written == table(model, keys.split()), (
        f"docs/training.md should have:\n{table(model, keys.split())}"
    )


def test_the_groups_of_the_example_load(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", DOC.read_text(), re.DOTALL)
    raw = tiny_recipe(tmp_path, tmp_path / "tokens", **tomllib.loads(block))
    groups = parse_recipe(raw).optimizer.groups
    assert [(one.lr_scale, one.weight_decay, one.freeze) for one in groups] == [
        (0.1, 0.0, False),
        (1, None, True),
    ]
