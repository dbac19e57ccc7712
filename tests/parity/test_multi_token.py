"""Multi-token prediction trains in every kind of layout as on one device, in fp64."""

import pytest
from support.configs import MODELS
from support.short_training import Case
from trilith.parallel_state import Layout
from trilith.recipes.sections import MemorySection

#: Two blocks predict two and three tokens ahead; the second is given the hidden states of the first.
DEEPSEEK = MODELS["deepseek_v3"] | {"mtp": True, "num_nextn_predict_layers": 2}
GLM = MODELS["glm4_moe"] | {"mtp": True}


def slow(*values, **changes):
    return pytest.param(*values, changes, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("config", "layout", "changes"),
    [
        (DEEPSEEK, Layout.of(tensor=2, pipeline=2, sequence=True), {"documents": True}),
        slow(DEEPSEEK, Layout.of(tensor=4)),
        slow(DEEPSEEK, Layout.of(tensor=2, context=2, sequence=True), documents=True),
        slow(DEEPSEEK, Layout.of(data=2, expert=2, zero=3)),
        slow(DEEPSEEK, Layout.of(pipeline=2, data=2, zero=3), memory=MemorySection(checkpointing="full")),
        slow(DEEPSEEK, Layout.of(pipeline=2, context=2, zero=1), memory=MemorySection(loss_chunk=5)),
        slow(DEEPSEEK, Layout.of(pipeline=2, virtual_stages=2), schedule="interleaved"),
        slow(GLM, Layout.of(tensor=2, pipeline=2, sequence=True)),
        slow(GLM, Layout.of(tensor=2, data=2, expert=2, zero=2)),
        slow(GLM | {"tie_word_embeddings": True}, Layout.of(tensor=2, pipeline=2)),
    ],
)
def test_it_equals_one_device(config, layout, changes, assert_same):
    assert_same(Case(config, layout, mtp=0.3, **changes))
