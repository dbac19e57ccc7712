"""Accumulation: a micro-batch of eight samples is eight of one, on one device and on several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from trilith.parallel_state import Layout


@pytest.mark.parametrize(
    ("layout", "micro_batch"),
    [
        pytest.param(Layout(), 8, id="one-device-1x8-is-8x1"),
        pytest.param(Layout.of(data=2, zero=2), 2, id="zero2-2x2"),
        pytest.param(Layout.of(pipeline=2), 4, id="pp2-2x4"),
    ],
)
def test_micro_batches_change_nothing(
    assert_same: Callable[..., None], layout: Layout, micro_batch: int
) -> None:
    assert_same("llama-tied", layout, samples=8, micro_batch=micro_batch, steps=2)
