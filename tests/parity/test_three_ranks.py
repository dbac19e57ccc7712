"""Three tensor ranks: the vocabulary is padded as the layout needs, the training is one device's."""

import pytest
from support.configs import MODELS
from support.short_training import Case
from trilith.parallel_state import Layout
from trilith.recipes.sections import MemorySection

LORA = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    ("model", "layout", "changes"),
    [
        pytest.param("llama-of-three", {}, {}, id="tied"),
        pytest.param("llama-of-three-untied", {}, {}, id="untied"),
        pytest.param("llama-of-three", {"sequence": True}, {"length": 18}, id="tied-sequence"),
        pytest.param(
            "llama-of-three-untied", {}, {"memory": MemorySection(loss_chunk=8)}, id="logits-in-chunks"
        ),
        pytest.param("llama-of-three", {}, {"lora": LORA, "clip": 1e-3}, id="tied-lora"),
        pytest.param("llama-of-three", {"pipeline": 2}, {}, id="tied-at-both-ends", marks=pytest.mark.slow),
        pytest.param("llama-of-three", {"data": 2, "zero": 3}, {}, id="tied-zero3", marks=pytest.mark.slow),
    ],
)
def test_three_tensor_ranks_equal_one_device(model, layout, changes, assert_same):
    config = MODELS[model] | {"num_hidden_layers": 3}
    assert_same(Case(config, Layout.of(tensor=3, **layout), **changes))
