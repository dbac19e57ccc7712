"""The headers of shipped recipes say what the search finds."""

from dataclasses import replace
from pathlib import Path

import pytest
import trilith
from trilith.planner.time import machine_named
from trilith.recipes import load_recipe
from trilith.search import Choice, find_layouts, read_request
from trilith.search.evaluate import Evaluator
from trilith.search.report import recipe_head
from trilith.training.dry_run import dry_run

NAME = "llama-3.1-405b-16384gpus"

QUICK = ("llama-3.2-1b-1gpu", "lora-llama-3.1-8b-1gpu", "llama-3.2-1b-8gpus")
SLOW = ("llama-3.1-8b-8gpus", "lora-llama-3.1-70b-8gpus", "llama-3.1-70b-64gpus", "gpt3-175b-1024gpus", NAME)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_recipe_is_what_the_search_finds_and_its_header_says_so(name):
    text, recipe = (Path(trilith.__path__[0]) / "recipes" / f"{name}.toml").read_text(), load_recipe(name)
    found = find_layouts(read_request(name, machine_named("h100-80gb"), None))
    memory, layout = recipe.memory, recipe.layout
    own = Choice(layout, recipe.pipeline_schedule, recipe.data.micro_batch, memory.checkpointing)
    assert str(found.best[0].choice) == str(own)
    assert dry_run(recipe).rank.total == found.best[0].bytes
    _, *predicted = recipe_head(found).splitlines()
    assert predicted and all(line in text for line in predicted)


def test_the_header_of_405b_states_this_layout_and_the_runner_up():
    text = (Path(trilith.__path__[0]) / "recipes" / f"{NAME}.toml").read_text()
    recipe = load_recipe(NAME)
    evaluator = Evaluator(read_request(NAME, machine_named("h100-80gb"), None))
    first = Choice(recipe.layout, recipe.pipeline_schedule, 1, recipe.memory.checkpointing)
    best = evaluator.answer(first)
    waits = best.time.parts["bubble"] / best.time.seconds
    assert (
        f"Predicted: {best.time.seconds:.2f} s a step, MFU {best.time.mfu.causal:.0%}, waits {waits:.0%}, "
        f"{best.bytes / 1e9:.1f} GB of a GPU." in text
    )
    second = evaluator.answer(
        replace(first, layout=replace(recipe.layout, context=8, data_shard=8), micro_batch=2)
    )
    assert f"micro_batch 2: {second.time.seconds:.2f} s, {second.bytes / 1e9:.1f} GB" in text
    assert second.time.seconds > best.time.seconds and waits == pytest.approx(0.03, abs=0.01)
