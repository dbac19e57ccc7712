"""Training LoRA in a layout is training it on one device: losses, gradients, adapters after three steps."""

import pytest
import torch
from support.short_training import Case
from trilith.parallel_state import Layout

ALL = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
LAST = {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "o_proj"], "layers_to_transform": [4]}

#: Every adapter in each layout: ``test_combinations.py``. Here most blocks have none.
LAYOUTS = [
    pytest.param("llama-tied", LAST, {"pipeline": 2, "data": 2, "zero": 1}, id="a-stage-without-zero1"),
    pytest.param("llama", LAST, {"data": 2, "zero": 2}, id="blocks-without-adapters-zero2"),
]

STACKS = {"r": 3, "lora_alpha": 6, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
DOWN = {"r": 2, "target_modules": [], "target_parameters": ["experts.down_proj"], "use_rslora": True}
#: Adapters on stacks of experts along each axis that cuts the stacks.
EXPERTS = [
    ("mixtral", STACKS, {"tensor": 2, "data": 2, "expert": 2, "zero": 2, "sequence": True}),
    ("glm4_moe", STACKS, {"context": 2, "expert": 2, "zero": 1}),
    ("qwen3_moe", STACKS, {"tensor": 2, "data": 2, "zero": 3}),
    ("qwen2_moe", STACKS, {"pipeline": 2, "tensor": 2}),
    ("mixtral", DOWN, {"data": 4, "expert": 2, "zero": 3}),
    ("mixtral", DOWN, {"tensor": 4}),
    ("gpt_oss", STACKS, {"tensor": 2, "data": 2, "expert": 2, "zero": 2, "sequence": True}),
]
LAYOUTS += [
    pytest.param(*one, marks=[pytest.mark.slow] if number else [], id=f"experts-{one[0]}-{number}")
    for number, one in enumerate(EXPERTS)
]


@pytest.mark.parametrize(("model", "lora", "layout"), LAYOUTS)
def test_a_layout_trains_the_adapters_of_one_device(assert_same, model, lora, layout):
    assert_same(model, Layout.of(**layout), lora=lora, clip=1e-3)


def test_the_base_stays_as_it_was_to_the_bit(one_device, models):
    outcome = one_device(Case(models["llama"], lora=ALL, clip=1e-3))
    for name, before in outcome.initial.items():
        moved = not torch.equal(before, outcome.parameters[name])
        assert moved == (".lora_" in name) == (name in outcome.gradients), name
