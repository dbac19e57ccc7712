"""Every layout trains the same model: losses, gradients, norms, weights of three fp64 steps, to 1e-10."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from trilith.parallel_state import Layout

LAYOUTS = [
    Layout.of(tensor=2),
    Layout.of(tensor=4),
    Layout.of(pipeline=2),
    Layout.of(pipeline=4),
    Layout.of(data=2),
    Layout.of(tensor=2, pipeline=2),
    Layout.of(tensor=2, data=2),
    Layout.of(pipeline=2, data=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", ["llama", "llama-tied", "gpt2"])
def test_it_equals_one_device(model: str, layout: Layout, assert_same: Callable[..., None]) -> None:
    assert_same(model, layout)


@pytest.mark.parametrize("model", ["llama-tied", "gpt2"])
def test_replicas_of_shards_equal_one_device(model: str, assert_same: Callable[..., None]) -> None:
    assert_same(model, Layout.of(data=4, zero=2, data_replicate=2))
