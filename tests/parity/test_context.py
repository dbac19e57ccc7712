"""The sequence over context ranks, by both kinds of attention: losses, gradients, norms, weights are one
device's.

Pairs of choices are in ``test_combinations.py``; here are three and more at once.
"""

import pytest
from trilith.parallel_state import Layout
from trilith.recipes.sections import MemorySection

RUNS = [
    # Documents of a few tokens: most blocks are masked in part, some are empty.
    pytest.param("llama", Layout.of(context=2, zero=1), {"documents": True}, id="documents"),
    pytest.param("gpt2", Layout.of(context=2, ring=True), {"documents": True}, id="ring-documents"),
    # Biases by distance, from positions that other ranks' keys have in the queries' documents.
    pytest.param("bloom", Layout.of(context=2, tensor=2, ring=True), {"documents": True}, id="alibi"),
    # The window ends within a chunk, and leaves blocks out.
    pytest.param("mistral", Layout.of(context=2, ring=True, zero=3), {}, id="ring-window-zero3"),
    # One key/value head, shared by the tensor ranks; S / context / tensor tokens between the blocks.
    pytest.param("llama-tied-kv1", Layout.of(context=2, tensor=2, sequence=True), {}, id="sequence"),
    pytest.param("gpt2", Layout.of(context=2, tensor=2, sequence=True, ring=True), {}, id="ring-sequence"),
    pytest.param(
        "llama", Layout.of(context=2, pipeline=2, ring=True), {"documents": True}, id="ring-pipeline"
    ),
    # Rotations by type of block, on each stage; sinks, with each kind of attention.
    pytest.param(
        "gemma3_text", Layout.of(context=2, pipeline=2), {"documents": True}, id="ropes-pipeline-documents"
    ),
    pytest.param(
        "gpt_oss", Layout.of(context=2, tensor=2, ring=True), {"documents": True}, id="ring-sinks-documents"
    ),
    pytest.param("gpt_oss", Layout.of(context=2, data=2, expert=2, zero=3), {}, id="sinks-experts-zero3"),
    pytest.param("llama-tied", Layout.of(context=2, pipeline=2), {"schedule": "gpipe"}, id="pipeline"),
    pytest.param("llama-kv1", Layout.of(context=2, data=2), {"micro_batch": 2}, id="data"),
    pytest.param("qwen3", Layout.of(context=2, data=2, zero=3, ring=True), {}, id="ring-data-zero3"),
    pytest.param("llama", Layout.of(context=2, data=2, zero=1), {}, id="data-zero1"),
    # Experts over the context ranks; a pipeline whose backward is in two parts, attention's once.
    pytest.param("mixtral", Layout.of(context=2, expert=2, ring=True), {}, id="ring-experts"),
    pytest.param(
        "qwen3_moe",
        Layout.of(context=2, data=2, expert=4, zero=3),
        {"documents": True},
        id="experts-zero3",
    ),
    pytest.param(
        "llama",
        Layout.of(context=2, pipeline=2, virtual_stages=2, v_shape=True, ring=True, zero=3),
        {"schedule": "zbv", "documents": True},
        id="ring-zbv-zero3",
    ),
    pytest.param(
        "gpt2",
        Layout.of(context=2, pipeline=2, virtual_stages=2),
        {"schedule": "interleaved-zero-bubble"},
        id="interleaved-zero-bubble",
    ),
    pytest.param(
        "llama",
        Layout.of(context=2, zero=2),
        {"lora": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}, "clip": 1e-3},
        id="lora",
    ),
    pytest.param("gpt2", Layout.of(context=2, data=2, zero=2), {}, id="data-zero2"),
    pytest.param(
        "qwen2",
        Layout.of(context=4, ring=True),
        {"memory": MemorySection(checkpointing="full", loss_chunk=5), "label_smoothing": 0.1},
        id="ring-four-checkpointing-chunks",
    ),
    pytest.param(
        "mistral",
        Layout.of(context=4),
        {"memory": MemorySection(checkpointing="selective"), "documents": True},
        id="four-selective",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "changes"), RUNS)
def test_it_equals_one_device(model, layout, changes, assert_same):
    assert_same(model, layout, **changes)
