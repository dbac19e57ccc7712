"""Check that schedules of several stages a rank, with other choices, give what one device gives."""

import pytest
from trilith.parallel_state import Layout
from trilith.recipes.sections import MemorySection

LOOP = {"virtual_stages": 2}
SHAPED = {"virtual_stages": 2, "v_shape": True}
SCHEDULES = {"interleaved": LOOP, "interleaved-zero-bubble": LOOP, "zbv": SHAPED, "dualpipev": SHAPED}

ALL = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
LAST = {"r": 4, "target_modules": ["q_proj", "o_proj"], "layers_to_transform": [4]}

#: By name: the model, the layout beside the pipeline, and the rest of the case.
WITH = {
    "lora": ("llama-tied", {}, {"lora": ALL, "clip": 1e-3}),
    "lora-zero3": ("llama", {"data": 2, "zero": 3}, {"lora": ALL, "clip": 1e-3, "samples": 8}),
    "stages-all-frozen": ("llama", {}, {"lora": LAST, "clip": 1e-3}),
    "stages-all-frozen-zero2": ("llama", {"data": 2, "zero": 2}, {"lora": LAST, "clip": 1e-3, "samples": 8}),
    "stages-all-frozen-replicas": (
        "llama",
        {"data": 2, "data_replicate": 2, "zero": 2},
        {"lora": LAST, "clip": 1e-3, "samples": 8},
    ),
    "replicas-of-shards": ("llama", {"data": 4, "data_replicate": 2, "zero": 3}, {"samples": 16}),
    "offload": ("llama", {"data": 2, "zero": 3}, {"memory": MemorySection(offload=True), "samples": 8}),
    "experts": ("mixtral", {"data": 2, "expert": 2, "zero": 1}, {"samples": 8}),
    "context": ("llama", {"context": 2}, {"documents": True}),
}
#: Pairs are in ``test_combinations.py``; these are of three choices, and of eight ranks.
ALWAYS = (("stages-all-frozen-replicas", "zbv"), ("replicas-of-shards", "interleaved-zero-bubble"))


@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(what, name, marks=() if (what, name) in ALWAYS else pytest.mark.slow)
        for what in WITH
        for name in SCHEDULES
    ],
)
def test_it_equals_one_device(what, name, assert_same):
    model, layout, more = WITH[what]
    assert_same(model, Layout.of(pipeline=2, **SCHEDULES[name], **layout), schedule=name, **more)
