"""Dropout in a layout: its masks are the layout's own, the copies of a weight stay equal, a run repeats."""

import math

import pytest
from support.short_training import Case, first_difference, outcome, train_rank
from trilith.parallel_state import Layout
from trilith.testing import run_parallel


@pytest.mark.parametrize(
    "layout", [Layout.of(tensor=2, sequence=True), Layout.of(tensor=2, pipeline=2)], ids=str
)
def test_dropout_keeps_the_copies_equal_and_repeats(layout, models):
    """Masks depend on the layout, so the numbers are no other layout's; ``outcome`` compares the copies."""
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    case = Case({**models["gpt2"], **rates, "n_layer": 2}, layout)
    once, again = (outcome(run_parallel(train_rank, layout.world, case)) for _ in range(2))
    assert first_difference(once, again, tolerance=0.0) is None
    assert once.losses[0] == pytest.approx(math.log(503), rel=0.1)
