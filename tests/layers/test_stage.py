"""Check which blocks a pipeline stage has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from trilith.layers import Stage, split_blocks, unshared_blocks
from trilith.parallel_state import BadInput, Layout, ParallelState


@given(st.integers(1, 200), st.integers(1, 64))
def test_blocks_are_spread_evenly_with_the_odd_ones_in_the_middle(num_layers, stages):
    if stages > num_layers:
        with pytest.raises(BadInput):
            split_blocks(num_layers, stages)
        return
    counts = split_blocks(num_layers, stages)
    assert len(counts) == stages and sum(counts) == num_layers
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1
    extra = num_layers % stages
    if 0 < extra <= stages - 2:
        assert counts[0] == counts[-1] == min(counts), "the ends, which also hold the vocabulary, come last"
    longer = [stage for stage, count in enumerate(counts) if count > min(counts)]
    assert not longer or longer == list(range(longer[0], longer[-1] + 1)), "side by side"


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 4), st.booleans(), st.integers(1, 3))
def test_every_block_is_held_once_and_in_order(num_layers, pipeline, virtual, v_shape, tensor):
    v_shape = v_shape and pipeline > 1
    virtual = 1 if pipeline == 1 else 2 if v_shape else virtual
    if pipeline * virtual > num_layers:
        return
    layout = Layout.of(tensor=tensor, pipeline=pipeline, virtual_stages=virtual, v_shape=v_shape)
    held = [
        Stage.of(num_layers, state=ParallelState.stand_in(layout, rank * tensor)) for rank in range(pipeline)
    ]
    assert sorted(block for stage in held for block in stage.blocks) == list(range(num_layers))
    parts = sorted((part for stage in held for part in stage.parts), key=lambda part: part.number)
    assert [part.number for part in parts] == list(range(layout.stages))
    assert [block for part in parts for block in part.blocks] == list(range(num_layers)), "in order"
    assert [part.first for part in parts] == [True] + [False] * (layout.stages - 1)
    assert [part.last for part in parts] == [False] * (layout.stages - 1) + [True]
    for rank, stage in enumerate(held):
        assert [part.number for part in stage.parts] == sorted(layout.stages_of(rank))
        assert all(layout.rank_of_stage(part.number) == rank for part in stage.parts)
        assert stage.first == (rank == 0) and stage.last == (rank == (0 if v_shape else pipeline - 1))


def test_the_two_shapes():
    loop = Layout.of(pipeline=3, virtual_stages=2)
    assert [loop.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    shaped = Layout.of(pipeline=3, virtual_stages=2, v_shape=True)
    assert [shaped.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(5, 2, [3, 2]), (5, 4, [1, 2, 1, 1]), (126, 16, [7, *[8] * 14, 7]), (8, 4, [2, 2, 2, 2])],
    ids=["E6-5-over-2", "E6-5-over-4", "E6-126-over-16", "even"],
)
def test_an_uneven_number_of_blocks_is_split_as_stated(layers, stages, counts):
    assert split_blocks(layers, stages) == counts


def test_a_split_by_hand_is_kept():
    state = ParallelState.stand_in(Layout.of(pipeline=3), 1)
    assert Stage.of(6, split=(1, 2, 3), state=state) == Stage((1, 2), first=False, last=False, number=1)


def test_a_block_may_hold_others_and_what_it_shares_is_gathered_with_the_model():
    inner, outer = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    outer.append(inner)
    model = nn.Sequential(outer, nn.Linear(2, 2), nn.Linear(2, 2))
    assert unshared_blocks(model, [inner, outer]) == [inner, outer]
    model[1].weight = outer[0].weight
    assert unshared_blocks(model, [inner, outer]) == [inner]
    assert unshared_blocks(model) == [model[2]]
