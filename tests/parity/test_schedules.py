"""Every schedule trains the same model, whichever rank holds which stages, in every layout it runs in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from trilith.parallel_state import Layout

LOOP: dict[str, Any] = {"virtual_stages": 2}
SHAPED: dict[str, Any] = {"virtual_stages": 2, "v_shape": True}
SCHEDULES = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": LOOP,
    "interleaved-zero-bubble": LOOP,
    "zbv": SHAPED,
    "dualpipev": SHAPED,
}
SEVERAL = [name for name in SCHEDULES if SCHEDULES[name]]


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("model", ["llama-tied", "gpt2"])
def test_several_stages_a_rank_equal_one_device(
    model: str, name: str, assert_same: Callable[..., None]
) -> None:
    layout = Layout.of(tensor=2, pipeline=2, sequence=model == "gpt2", **SCHEDULES[name])
    assert_same(model, layout, schedule=name, documents=True)


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_with_zero_they_equal_one_device(zero: int, name: str, assert_same: Callable[..., None]) -> None:
    """Gradients summed once a step, or at every micro-batch; made in one backward pass or in two."""
    model = ("llama", "llama-tied", "gpt2")[zero - 1]
    layout = Layout.of(pipeline=2, data=2, zero=zero, **SCHEDULES[name])
    assert_same(model, layout, schedule=name, samples=8)


def test_stages_cut_by_hand_equal_one_device(assert_same: Callable[..., None]) -> None:
    assert_same("llama", Layout.of(pipeline=2, **LOOP), schedule="interleaved", split=(1, 1, 2, 1))
