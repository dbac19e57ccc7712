"""Models with experts train as on one device, wherever the experts lie; their balance loss is in it."""

import pytest
from trilith.parallel_state import Layout
from trilith.recipes.sections import MemorySection

MORE = [
    Layout.of(context=2, expert=2),
    Layout.of(context=2, expert=2, zero=1),
    Layout.of(data=2, expert=2),
    Layout.of(data=2, expert=2, zero=2),
    Layout.of(data=4, expert=4, zero=1),
    Layout.of(data=4, expert=2, zero=3),
    Layout.of(tensor=2, data=2, expert=2, zero=2, sequence=True),
    Layout.of(tensor=2, pipeline=2, sequence=True),
    Layout.of(pipeline=2, data=2, expert=2, zero=1),
    Layout.of(context=2, data=2, expert=4, zero=1),
    Layout.of(context=2, tensor=2, expert=2, zero=3, sequence=True),
    Layout.of(pipeline=2, data=2, expert=2, zero=3),
    Layout.of(tensor=2),
    Layout.of(tensor=4, sequence=True),
    Layout.of(data=4, zero=3),
    Layout.of(data=4, expert=2),
    Layout.of(data=4, expert=4),
    Layout.of(data=4, expert=2, zero=1, data_replicate=2),
    Layout.of(data=4, expert=2, zero=2),
    Layout.of(tensor=2, data=2, expert=2),
    Layout.of(tensor=2, data=2, expert=2, zero=3),
    Layout.of(tensor=2, pipeline=2),
    Layout.of(pipeline=2, data=2, expert=2),
    Layout.of(tensor=2, pipeline=2, data=2, expert=2, zero=1, sequence=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE, ids=str)
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe", "glm4_moe"])
def test_experts_equal_one_device_in_every_layout(model, layout, assert_same):
    assert_same(model, layout)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"])
def test_experts_equal_one_device_under_every_schedule(schedule, assert_same):
    v_shape = schedule in ("zbv", "dualpipev")
    layout = Layout.of(pipeline=2, data=2, expert=2, zero=2, virtual_stages=2, v_shape=v_shape)
    assert_same("mixtral", layout, schedule=schedule, samples=8)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_blocks_that_are_computed_again_route_and_count_as_before(mode, assert_same):
    """The experts are gathered by hooks of their own, again where a block is computed again."""
    memory = MemorySection(checkpointing=mode)
    assert_same("mixtral", Layout.of(data=2, expert=2, zero=3), memory=memory, micro_batch=2)


@pytest.mark.slow
def test_stacks_and_biases_of_fewer_experts_than_ranks_are_cut_along_their_width(assert_same):
    assert_same("gpt_oss", Layout.of(data=3, zero=3), samples=6)
