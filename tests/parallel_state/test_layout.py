"""Check where each rank stands: one to one, in Megatron's order; bad numbers are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import Refused, refusals
from trilith.parallel_state import AXES, BadInput, Coordinates, Layout

_size = st.integers(1, 4)


@st.composite
def layouts(draw):
    sizes = {axis: draw(_size) for axis in ("tensor", "context", "data_shard", "data_replicate", "pipeline")}
    return Layout(**sizes, zero=1 if sizes["data_shard"] > 1 else draw(st.integers(0, 3)))


@given(layouts())
def test_a_stage_s_first_rank_is_the_first_with_its_coordinate(layout):
    for stage in range(layout.pipeline):
        ranks = (rank for rank, at in enumerate(layout.places()) if at.pipeline == stage)
        assert layout.first_rank(stage) == next(ranks)


@given(layouts())
def test_coordinates_and_ranks_are_a_bijection(layout):
    places = list(layout.places())
    assert len(set(places)) == len(places) == layout.world
    assert [layout.rank(at) for at in places] == list(range(layout.world))


def test_tensor_is_the_fastest_axis_and_pipeline_the_slowest():
    layout = Layout(tensor=2, context=2, data_shard=2, data_replicate=2, pipeline=2, zero=1)
    steps = {axis: layout.rank(Coordinates(**{axis: 1})) for axis in AXES}
    assert steps == {"tensor": 1, "context": 2, "data_shard": 4, "data_replicate": 8, "pipeline": 16}
    assert layout.world == 32 and layout.data == 4
    layout.check_world(32)


@pytest.mark.parametrize(
    ("asked", "shard", "replicate"),
    [
        ({"data": 4}, 1, 4),
        ({"data": 4, "zero": 1}, 4, 1),
        ({"data": 4, "zero": 2, "data_replicate": 2}, 2, 2),
        ({"data": 4, "zero": 0, "data_replicate": 4}, 1, 4),
    ],
)
def test_data_ranks_are_replicas_without_zero_and_shards_with_it(asked, shard, replicate):
    layout = Layout.of(**asked)
    assert (layout.data_shard, layout.data_replicate, layout.data) == (shard, replicate, 4)


REFUSED = {
    "E11-zero": (lambda: Layout(tensor=0), "tensor: expected .*from 1 up"),
    "E11-negative": (lambda: Layout(pipeline=-2), "pipeline: expected .*from 1 up"),
    "E11-bool": (lambda: Layout(tensor=True), "tensor: expected .*whole number"),
    "E11-sequence": (lambda: Layout(sequence=1), "sequence: expected true or false"),
    "E14-four": (lambda: Layout(zero=4), "zero: expected .*0, 1, 2 or 3"),
    "E14-shards-at-stage-0": (lambda: Layout(data_shard=2), "zero: expected .*data_shard=2"),
    "E11-replicas": (lambda: Layout.of(data=3, zero=1, data_replicate=2), "data_replicate: expected .*3"),
    "E11-no-replica": (lambda: Layout.of(data=2, zero=1, data_replicate=0), "data_replicate: expected .*2"),
    "E11-expert": (lambda: Layout(context=2, expert=3), "expert: expected .*= 2"),
    "E10-rank": (lambda: Layout.of(tensor=2).coordinates(2), "rank: expected .*0 to 1"),
    **{
        f"E10-{why}": (
            lambda world=world: Layout.of(tensor=2, pipeline=2).check_world(world),
            rf"expected 4 ranks = tensor 2 x pipeline 2, found {world} started\. {todo}, or start 4 ranks",
        )
        for why, world, todo in (
            *(("fewer", 1, "Change an axis"), ("uneven", 3, "Change an axis")),
            ("more", 8, "Say layout.data=2"),
        )
    },
}
test_a_number_that_cannot_be_is_refused_with_what_was_expected = refusals(
    [Refused(why, lambda _, call=call: call(), says) for why, (call, says) in REFUSED.items()]
)


def test_expert_is_no_factor_of_the_world():
    assert Layout(context=2, data_shard=2, expert=4, zero=1).world == 4


@pytest.mark.parametrize(
    ("layout", "length", "expected", "nearest"),
    [
        (Layout.of(context=2), 10, "2 x context=2", "8 or 12"),
        (Layout.of(context=4), 5, "2 x context=4", "8"),
        (Layout.of(tensor=2, sequence=True), 7, "tensor=2 under sequence parallelism", "6 or 8"),
        (
            Layout.of(context=2, tensor=3, sequence=True),
            16,
            "2 x context=2 and tensor=3 under sequence parallelism",
            "12 or 24",
        ),
    ],
    ids=["E7-two", "E7-too-short", "E9-sequence", "E7-and-sequence"],
)
def test_a_length_that_cannot_be_cut_is_refused_with_the_nearest_that_can(layout, length, expected, nearest):
    with pytest.raises(BadInput) as error:
        layout.check_length(length, "recipe", "data.sequence_length")
    assert str(error.value) == (
        f"recipe: data.sequence_length: expected a multiple of {expected}, found {length}. "
        f"Nearest legal data.sequence_length: {nearest}"
    )
    for legal in map(int, nearest.split(" or ")):
        layout.check_length(legal, "recipe", "data.sequence_length")


def test_a_layout_reads_as_its_unusual_numbers():
    assert str(Layout()) == "one rank"
    assert str(Layout.of(tensor=2, data=2, zero=1)) == "tensor 2, data 2, zero 1"
    hybrid = Layout.of(data=4, zero=2, data_replicate=2, tensor=2, sequence=True)
    assert str(hybrid) == "tensor 2, data 4, data_replicate 2, zero 2, sequence true"
    assert str(Layout.of(data=2)) == "data 2"
