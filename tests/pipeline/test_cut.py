"""Cuts by cost against every possible cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trilith.pipeline.cut import cut_by_cost, stage_costs

COST = st.integers(1, 9).map(float)


@given(st.lists(COST, min_size=1, max_size=9), st.integers(1, 5), st.integers(0, 12), st.integers(0, 12))
def test_no_cut_has_a_faster_slowest_stage(blocks, stages, first, last):
    if stages > len(blocks):
        return
    found = cut_by_cost(blocks, stages, first=first, last=last)
    assert len(found) == stages and sum(found) == len(blocks) and min(found) >= 1
    every = []
    for places in combinations(range(1, len(blocks)), stages - 1):
        bounds = (0, *places, len(blocks))
        counts = [b - a for a, b in pairwise(bounds)]
        costs = stage_costs(counts, blocks, first=first, last=last)
        every.append((max(costs), sum(cost**2 for cost in costs)))
    costs = stage_costs(found, blocks, first=first, last=last)
    assert max(costs) == pytest.approx(min(worst for worst, _ in every))
    assert sum(cost**2 for cost in costs) == pytest.approx(min(every)[1])


def test_the_head_takes_the_place_of_blocks():
    assert cut_by_cost([1.0] * 8, 4) == [2, 2, 2, 2]
    assert cut_by_cost([1.0] * 8, 4, last=2.0) == [2, 2, 3, 1]
    assert cut_by_cost([1.0] * 16, 4, first=0.01, last=4.0) == [5, 5, 5, 1]
