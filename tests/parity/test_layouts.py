"""Every layout trains the same model: losses, gradients, norms, weights of three fp64 steps, to 1e-10."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from trilith.parallel_state import Layout
from trilith.testing import run_parallel
from trilith.testing.short_training import Case, first_difference, outcome, train_rank

LAYOUTS = [
    Layout.of(tensor=2),
    Layout.of(tensor=4),
    Layout.of(pipeline=2),
    Layout.of(pipeline=4),
    Layout.of(data=2),
    pytest.param(Layout.of(data=4), marks=pytest.mark.slow),
    Layout.of(tensor=2, pipeline=2),
    Layout.of(tensor=2, data=2),
    Layout.of(pipeline=2, data=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", ["llama", "llama-tied", "gpt2"])
def test_it_equals_one_device(model: str, layout: Layout, assert_same: Callable[..., None]) -> None:
    assert_same(model, layout)


@pytest.mark.parametrize(
    "layout",
    [Layout.of(tensor=2, sequence=True), Layout.of(tensor=2, pipeline=2), Layout.of(data=2, zero=3)],
    ids=str,
)
@pytest.mark.parametrize("model", ["mistral", "qwen2", "qwen3", "qwen3-kv1"])
def test_llamas_relatives_equal_one_device(
    model: str, layout: Layout, assert_same: Callable[..., None]
) -> None:
    assert_same(model, layout)


@pytest.mark.parametrize("model", ["llama-tied", "gpt2"])
def test_replicas_of_shards_equal_one_device(model: str, assert_same: Callable[..., None]) -> None:
    assert_same(model, Layout.of(data=4, zero=2, data_replicate=2))


@pytest.mark.parametrize(
    "layout", [Layout.of(tensor=2, sequence=True), Layout.of(tensor=2, pipeline=2)], ids=str
)
def test_dropout_keeps_the_copies_equal_and_repeats(
    layout: Layout, models: dict[str, dict[str, Any]]
) -> None:
    """Masks depend on the layout, so the numbers are no other layout's; ``outcome`` compares the copies."""
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    case = Case({**models["gpt2"], **rates}, layout)
    once, again = (outcome(run_parallel(train_rank, layout.world, case)) for _ in range(2))
    assert first_difference(once, again, tolerance=0.0) is None
    assert once.losses[0] == pytest.approx(math.log(503), rel=0.1)
