"""Compiled blocks train as one device's do: in parts, sharded, checkpointed, in stages; names stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trilith.parallel_state import BadInput, Layout
from trilith.recipes.recipe import parse_recipe
from trilith.recipes.sections import MemorySection
from trilith.testing import run_parallel
from trilith.testing.short_runs import run_recipe, tiny_recipe, write_tokens
from trilith.testing.short_training import Case, first_difference, outcome, train_rank
from trilith.testing.tiny_models import TINY_GPT2, TINY_LLAMA
from trilith.training.run_plan import plan


@pytest.mark.parametrize(
    ("model", "layout", "memory"),
    [
        ("llama", Layout.of(tensor=2, sequence=True), MemorySection(checkpointing="full")),
        ("gpt2", Layout.of(data=2, zero=3), MemorySection(loss_chunk=5)),
        ("llama-tied", Layout.of(tensor=2, pipeline=2), MemorySection(checkpointing="every")),
    ],
    ids=str,
)
def test_compiled_blocks_equal_one_device(
    model: str, layout: Layout, memory: MemorySection, assert_same: Callable[..., None]
) -> None:
    """Traced and differentiated by torch's compiler, not made into C++: that takes minutes."""
    assert_same(model, layout, memory=memory, compiled="aot_eager", steps=2)


def test_adapters_of_ten_ranks_are_compiled(models: dict[str, dict[str, Any]]) -> None:
    """Each rank may be another graph of one function, and torch stops at 8 by default."""
    ranks = {f"layers.{block}.self_attn.q_proj": 2 + block for block in range(10)}
    lora = {"r": 1, "target_modules": ["q_proj"], "rank_pattern": ranks}
    case = Case({**models["llama"], "num_hidden_layers": 10}, lora=lora, steps=1)
    eager, compiled = (
        outcome(run_parallel(train_rank, 1, replace(case, compiled=backend), timeout=200))
        for backend in ("", "aot_eager")
    )
    assert first_difference(eager, compiled, tolerance=1e-10) is None


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_compiled_run_is_resumed_by_one_that_is_not_and_the_other_way_round(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    config = {"config": {**TINY_LLAMA, "num_hidden_layers": 10}}
    losses = []
    for name, first in (("eager", False), ("compiled", True)):
        layout = {"tensor": 2, "sequence": True} if first else {}
        raw = tiny_recipe(tmp_path / name, tokens, model=config, steps=4, layout=layout)
        half = run_parallel(run_recipe, 1 + first, raw | {"stop_after": 2, "compile": first}, timeout=1000)
        rest = run_parallel(run_recipe, 1, raw | {"layout": {}, "compile": first}, timeout=1000)
        losses.append([one.loss for one in [*half[0], *rest[0]]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"memory": {"checkpointing": "selective"}}, "memory.checkpointing"),
        ({"layout": {"context": 2}}, "layout.context"),
        ({"layout": {"pipeline": 2, "schedule": "zbv"}}, "layout.schedule"),
        ({"debug": {"collectives": True}}, "debug.collectives"),
        ({"model": {"config": TINY_GPT2}, "layout": {"tensor": 2}}, "compile"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_what_cannot_be_in_one_graph_is_refused(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    raw = tiny_recipe(tmp_path / "run", tmp_path / "tokens", compile=True, **changes)
    with pytest.raises(BadInput) as error:
        plan(parse_recipe(raw))
    assert error.value.key == key and "\n" not in str(error.value)
