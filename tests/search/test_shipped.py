"""The headers of shipped recipes say what the search finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trilith
from trilith.planner.time import machine_named
from trilith.recipes import load_recipe
from trilith.search import Choice, read_request
from trilith.search.evaluate import Evaluator

NAME = "llama-3.1-405b-16384gpus"


def test_the_header_of_405b_states_this_layout_and_the_runner_up() -> None:
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
    assert second.time.seconds > best.time.seconds and waits == pytest.approx(0.067, abs=0.01)
