"""Three choices and more at once train as one device does: the covering array holds only pairs of them.

Context ranks, experts, adapters, multi-token prediction, schedules with several stages a rank, three ranks.
"""

import torch
from support.configs import MODELS, config
from support.layout_cases import COMPARED, Layouts, one_device, row
from support.short_training import Case

SLOW = COMPARED | {"slow": True}
LOOP, SHAPED = {"virtual_stages": 2}, {"virtual_stages": 2, "v_shape": True}
SCHEDULES = {"interleaved": LOOP, "interleaved-zero-bubble": LOOP, "zbv": SHAPED, "dualpipev": SHAPED}
LORA = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
ADAPTERS = {"lora": LORA, "clip": 1e-3}

# The sequence over context ranks, by both kinds of attention
CONTEXT = [
    # Documents of a few tokens: most blocks are masked in part, some are empty.
    ("documents", "llama", {"zero": 1}, {"documents": True}),
    ("ring-documents", "gpt2", {"ring": True}, {"documents": True}),
    # Biases by distance, from positions that other ranks' keys have in the queries' documents.
    ("alibi", "bloom", {"tensor": 2, "ring": True}, {"documents": True}),
    # The window ends within a chunk, and leaves blocks out.
    ("ring-window-zero3", "mistral", {"ring": True, "zero": 3}, {}),
    # One key/value head, shared by the tensor ranks; S / context / tensor tokens between the blocks.
    ("sequence", "llama-tied-kv1", {"tensor": 2, "sequence": True}, {}),
    ("ring-sequence", "gpt2", {"tensor": 2, "sequence": True, "ring": True}, {}),
    ("ring-pipeline", "llama", {"pipeline": 2, "ring": True}, {"documents": True}),
    # Rotations by type of block, on each stage; sinks, with each kind of attention.
    ("ropes-pipeline-documents", "gemma3_text", {"pipeline": 2}, {"documents": True}),
    ("ring-sinks-documents", "gpt_oss", {"tensor": 2, "ring": True}, {"documents": True}),
    ("sinks-experts-zero3", "gpt_oss", {"data": 2, "expert": 2, "zero": 3}, {}),
    ("pipeline", "llama-tied", {"pipeline": 2}, {"schedule": "gpipe"}),
    ("data", "llama-kv1", {"data": 2}, {"micro_batch": 2}),
    ("ring-data-zero3", "qwen3", {"data": 2, "zero": 3, "ring": True}, {}),
    ("data-zero1", "llama", {"data": 2, "zero": 1}, {}),
    # Experts over the context ranks; a pipeline whose backward is in two parts, attention's once.
    ("ring-experts", "mixtral", {"expert": 2, "ring": True}, {}),
    ("experts-zero3", "qwen3_moe", {"data": 2, "expert": 4, "zero": 3}, {"documents": True}),
    (
        "ring-zbv-zero3",
        "llama",
        {"pipeline": 2, **SHAPED, "ring": True, "zero": 3},
        {"schedule": "zbv", "documents": True},
    ),
    ("interleaved-zero-bubble", "gpt2", {"pipeline": 2, **LOOP}, {"schedule": "interleaved-zero-bubble"}),
    ("lora", "llama", {"zero": 2}, ADAPTERS),
    ("data-zero2", "gpt2", {"data": 2, "zero": 2}, {}),
]

# Wherever experts lie; their balance loss is in it
EXPERTS = [
    {"context": 2, "expert": 2},
    {"context": 2, "expert": 2, "zero": 1},
    {"data": 2, "expert": 2},
    {"data": 2, "expert": 2, "zero": 2},
    {"data": 4, "expert": 4, "zero": 1},
    {"data": 4, "expert": 2, "zero": 3},
    {"tensor": 2, "data": 2, "expert": 2, "zero": 2, "sequence": True},
    {"tensor": 2, "pipeline": 2, "sequence": True},
    {"pipeline": 2, "data": 2, "expert": 2, "zero": 1},
    {"context": 2, "data": 2, "expert": 4, "zero": 1},
    {"context": 2, "tensor": 2, "expert": 2, "zero": 3, "sequence": True},
    {"pipeline": 2, "data": 2, "expert": 2, "zero": 3},
    {"tensor": 2},
    {"tensor": 4, "sequence": True},
    {"data": 4, "zero": 3},
    {"data": 4, "expert": 2},
    {"data": 4, "expert": 4},
    {"data": 4, "expert": 2, "zero": 1, "data_replicate": 2},
    {"data": 4, "expert": 2, "zero": 2},
    {"tensor": 2, "data": 2, "expert": 2},
    {"tensor": 2, "data": 2, "expert": 2, "zero": 3},
    {"tensor": 2, "pipeline": 2},
    {"pipeline": 2, "data": 2, "expert": 2},
    {"tensor": 2, "pipeline": 2, "data": 2, "expert": 2, "zero": 1, "sequence": True},
]

# Adapters on stacks of experts along each axis that cuts the stacks
STACKS = {"r": 3, "lora_alpha": 6, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
DOWN = {"r": 2, "target_modules": [], "target_parameters": ["experts.down_proj"], "use_rslora": True}
ON_EXPERTS = [
    ("mixtral", STACKS, {"tensor": 2, "data": 2, "expert": 2, "zero": 2, "sequence": True}),
    ("glm4_moe", STACKS, {"context": 2, "expert": 2, "zero": 1}),
    ("qwen3_moe", STACKS, {"tensor": 2, "data": 2, "zero": 3}),
    ("qwen2_moe", STACKS, {"pipeline": 2, "tensor": 2}),
    ("mixtral", DOWN, {"data": 4, "expert": 2, "zero": 3}),
    ("mixtral", DOWN, {"tensor": 4}),
    ("gpt_oss", STACKS, {"tensor": 2, "data": 2, "expert": 2, "zero": 2, "sequence": True}),
]
LAST = {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "o_proj"], "layers_to_transform": [4]}
FROZEN_STAGES = {"lora": LAST, "clip": 1e-3}

# Multi-token prediction: two blocks predict two and three tokens ahead
DEEPSEEK = config("deepseek_v3", mtp=True, num_nextn_predict_layers=2)
GLM = config("glm4_moe", mtp=True)
MTP = [
    (DEEPSEEK, {"tensor": 4}, {}),
    (DEEPSEEK, {"tensor": 2, "context": 2, "sequence": True}, {"documents": True}),
    (DEEPSEEK, {"data": 2, "expert": 2, "zero": 3}, {}),
    (DEEPSEEK, {"pipeline": 2, "data": 2, "zero": 3}, {"checkpointing": "full"}),
    (DEEPSEEK, {"pipeline": 2, "context": 2, "zero": 1}, {"chunk": 5}),
    (DEEPSEEK, {"pipeline": 2, **LOOP}, {"schedule": "interleaved"}),
    (GLM, {"tensor": 2, "pipeline": 2, "sequence": True}, {}),
    (GLM, {"tensor": 2, "data": 2, "expert": 2, "zero": 2}, {}),
    (GLM | {"tie_word_embeddings": True}, {"tensor": 2, "pipeline": 2}, {}),
]

# Several stages a rank, by name: the model, the layout beside the pipeline, the rest of the case
WITH = {
    "lora": ("llama-tied", {}, ADAPTERS),
    "lora-zero3": ("llama", {"data": 2, "zero": 3}, ADAPTERS | {"samples": 8}),
    "all-frozen": ("llama", {}, FROZEN_STAGES),
    "all-frozen-zero2": ("llama", {"data": 2, "zero": 2}, FROZEN_STAGES | {"samples": 8}),
    "all-frozen-replicas": (
        "llama",
        {"data": 2, "data_replicate": 2, "zero": 2},
        FROZEN_STAGES | {"samples": 8},
    ),
    "replicas-of-shards": ("llama", {"data": 4, "data_replicate": 2, "zero": 3}, {"samples": 16}),
    "offload": ("llama", {"data": 2, "zero": 3}, {"offload": True, "samples": 8}),
    "experts": ("mixtral", {"data": 2, "expert": 2, "zero": 1}, {"samples": 8}),
    "context": ("llama", {"context": 2}, {"documents": True}),
}
#: Of three choices, and of eight ranks.
ALWAYS = (("all-frozen-replicas", "zbv"), ("replicas-of-shards", "interleaved-zero-bubble"))
TRANSPOSED = config("gpt_oss", num_hidden_layers=4, layer_types=["full_attention"] * 4)

# Three tensor ranks: the vocabulary is padded as the layout needs
THREE = [
    ("tied", "llama-of-three", {}, {}),
    ("untied", "llama-of-three-untied", {}, {}),
    ("tied-sequence", "llama-of-three", {"sequence": True}, {"length": 18}),
    ("logits-in-chunks", "llama-of-three-untied", {}, {"chunk": 8}),
    ("tied-lora", "llama-of-three", {}, ADAPTERS),
    ("tied-at-both-ends", "llama-of-three", {"pipeline": 2}, {"asks": SLOW}),
    ("tied-zero3", "llama-of-three", {"data": 2, "zero": 3}, {"asks": SLOW}),
]

LAYOUTS = Layouts(
    [
        *(
            row(f"context-{why}", model, {"context": 2} | layout, asks=SLOW, **more)
            for why, model, layout, more in CONTEXT
        ),
        *(
            row(f"experts-{model}-{number}-{'-'.join(layout)}", model, layout, asks=SLOW)
            for model in ("mixtral", "qwen3_moe", "glm4_moe")
            for number, layout in enumerate(EXPERTS)
        ),
        *(
            row(
                f"experts-{schedule}",
                "mixtral",
                {"pipeline": 2, "data": 2, "expert": 2, "zero": 2, **shape},
                schedule=schedule,
                samples=8,
                asks=SLOW,
            )
            for schedule, shape in SCHEDULES.items()
        ),
        # The experts are gathered by hooks of their own, again where a block is computed again.
        *(
            row(
                f"experts-gathered-again-{mode}",
                "mixtral",
                {"data": 2, "expert": 2, "zero": 3},
                mode,
                micro_batch=2,
            )
            for mode in ("selective", "full")
        ),
        # Stacks and biases of fewer experts than ranks are cut along their width.
        row("experts-cut-along-their-width", "gpt_oss", {"data": 3, "zero": 3}, samples=6, asks=SLOW),
        # Most blocks have no adapter.
        row(
            "lora-a-stage-without-zero1", "llama-tied", {"pipeline": 2, "data": 2, "zero": 1}, **FROZEN_STAGES
        ),
        row("lora-blocks-without-zero2", "llama", {"data": 2, "zero": 2}, **FROZEN_STAGES),
        *(
            row(
                f"lora-on-experts-{number}-{model}",
                model,
                layout,
                lora=lora,
                clip=1e-3,
                asks=SLOW if number else {},
            )
            for number, (model, lora, layout) in enumerate(ON_EXPERTS)
        ),
        row(
            "mtp-two-stages",
            DEEPSEEK,
            {"tensor": 2, "pipeline": 2, "sequence": True},
            documents=True,
            mtp=0.3,
        ),
        *(
            row(f"mtp-{number}", model, layout, mtp=0.3, asks=SLOW, **more)
            for number, (model, layout, more) in enumerate(MTP)
        ),
        *(
            row(
                f"stages-{what}-{name}",
                model,
                {"pipeline": 2, **shape, **layout},
                schedule=name,
                asks={} if (what, name) in ALWAYS else SLOW,
                **more,
            )
            for what, (model, layout, more) in WITH.items()
            for name, shape in SCHEDULES.items()
        ),
        *(
            row(
                f"stages-{model}-{name}",
                model,
                {"tensor": 2, "pipeline": 2, "sequence": model == "gpt2", **shape},
                schedule=name,
                documents=True,
                asks=SLOW,
            )
            for model in ("llama-tied", "gpt2")
            for name, shape in SCHEDULES.items()
        ),
        # GPT-OSS multiplies by transposed stacks of experts, and autograd gives gradients transposed as well.
        row("gradients-of-transposed-stacks", TRANSPOSED, {"pipeline": 2, **SHAPED}, schedule="zbv"),
        *(
            row(f"three-{why}", config(name, layers=3), {"tensor": 3, **layout}, **more)
            for why, name, layout, more in THREE
        ),
    ]
)
test_layouts_of_several_choices_equal_one_device = LAYOUTS.equal_one_device()
test_layouts_of_several_choices_send_what_is_planned = LAYOUTS.send_what_is_planned()


def test_training_adapters_leaves_the_base_as_it_was_to_the_bit():
    (outcome,) = one_device([Case(MODELS["llama"], lora=LORA, clip=1e-3)])
    for name, before in outcome.initial.items():
        moved = not torch.equal(before, outcome.parameters[name])
        assert moved == (".lora_" in name) == (name in outcome.gradients), name
