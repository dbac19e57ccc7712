"""Each family trains in every kind of layout as on one device: two fp64 steps, to 1e-10."""

import pytest
from support.combinations import FAMILIES as IN_COMBINATIONS
from support.configs import EXPERTS, MODELS
from support.models_page import MEASURED, axes_of
from trilith.models import FAMILIES
from trilith.parallel_state import Layout
from trilith.recipes.sections import MemorySection

ALL = [
    Layout.of(tensor=2, sequence=True),
    Layout.of(tensor=2, context=2, sequence=True),
    Layout.of(tensor=4, sequence=True),
    Layout.of(tensor=2, pipeline=2),
    Layout.of(data=2, zero=3),
    Layout.of(pipeline=2, data=2, zero=1),
]
MIXED = [
    Layout.of(tensor=2, data=2, expert=2, zero=3, sequence=True),
    Layout.of(data=2, expert=2, zero=2),
    Layout.of(context=2, expert=2, zero=1),
]
#: Families of the covering array of ``test_combinations``.
IN_ARRAY = {MODELS[row]["model_type"] for row in IN_COMBINATIONS}


def cases():
    """Return the cases; only the first layout of each family is in every run, the others are slow.

    So are all of a family that the covering array trains in many layouts.
    """
    found = []
    for family in FAMILIES:
        row = next(row for row, raw in MODELS.items() if raw["model_type"] == family)
        for number, layout in enumerate([*(MIXED if row in EXPERTS else []), *ALL]):
            marks = [pytest.mark.slow] if number or family in IN_ARRAY else []
            found.append(pytest.param(row, layout, marks=marks, id=f"{row}-{layout}"))
    return found


@pytest.mark.parametrize(("row", "layout"), cases())
def test_it_equals_one_device(row, layout, assert_same, record_property):
    record_property(MEASURED, [MODELS[row]["model_type"], axes_of(layout), assert_same(row, layout)])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_equal_one_device(family, assert_same, record_property):
    """Torch's compiler traces and differentiates each block, or its parts that can be one graph."""
    row = next(row for row, raw in MODELS.items() if raw["model_type"] == family)
    layout = Layout.of(tensor=2, sequence=True)
    worst = assert_same(row, layout, compiled="aot_eager", steps=2)
    record_property(MEASURED, [family, ["compile"], worst])


def test_an_output_layer_s_bias_is_cut_with_the_vocabulary_in_the_chunked_loss_too(assert_same):
    assert_same("gptj", Layout.of(tensor=2, sequence=True), memory=MemorySection(loss_chunk=5), z_loss=0.01)


def test_embeddings_narrower_than_hidden_states_are_one_device_s(assert_same):
    assert_same("opt-350m", Layout.of(tensor=2, sequence=True), memory=MemorySection(loss_chunk=5))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*ALL[1:], Layout.of(pipeline=2, context=2)], ids=str)
def test_they_are_in_other_layouts_too(layout, assert_same):
    assert_same("opt-350m", layout)


def test_biases_by_distance_are_of_positions_in_documents_over_context_ranks(assert_same):
    assert_same("falcon-rw", Layout.of(context=2, tensor=2, ring=True), documents=True)
