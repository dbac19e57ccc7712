"""Each family trains in every kind of layout as on one device: two fp64 steps, to 1e-10."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from trilith.models import FAMILIES
from trilith.parallel_state import Layout
from trilith.testing.tiny_models import EXPERTS, MODELS

ALL = [
    Layout.of(tensor=2, context=2, sequence=True),
    Layout.of(tensor=4, sequence=True),
    Layout.of(tensor=2, pipeline=2),
    Layout.of(data=2, zero=3),
    Layout.of(pipeline=2, data=2, zero=1),
]
MIXED = [
    Layout.of(data=2, expert=2, zero=2),
    Layout.of(context=2, expert=2, zero=1),
    Layout.of(tensor=2, data=2, expert=2, zero=3, sequence=True),
]


def cases() -> list[object]:
    """Return the cases; only the first layout of each family is in every run, the others are slow."""
    found: list[object] = []
    for family in FAMILIES:
        row = next(row for row, raw in MODELS.items() if raw["model_type"] == family)
        for number, layout in enumerate([*(MIXED if row in EXPERTS else []), *ALL]):
            marks = [pytest.mark.slow] if number else []
            found.append(pytest.param(row, layout, marks=marks, id=f"{row}-{layout}"))
    return found


@pytest.mark.parametrize(("row", "layout"), cases())
def test_it_equals_one_device(row: str, layout: Layout, assert_same: Callable[..., None]) -> None:
    assert_same(row, layout)
