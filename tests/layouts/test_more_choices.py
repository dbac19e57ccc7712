"""Three choices and more at once train as one device does: the covering array holds only pairs of them.

Context ranks, experts, adapters, multi-token prediction, schedules with several stages a rank, three ranks.
"""

import torch
from support.combinations import FROZEN
from support.configs import MODELS, config
from support.layout_cases import COMPARED, Layouts, one_device, row
from support.short_training import Case

SLOW = COMPARED | {"slow": True}
SCHEDULES = {"interleaved": "loop2", "interleaved-zero-bubble": "loop2", "zbv": "v", "dualpipev": "v"}
LORA = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
ADAPTERS, DOCUMENTS = {"lora": LORA, "clip": 1e-3}, {"documents": True}
HEAD_ALONE = {"frozen": FROZEN["the output layer"], "clip": 1e-5}

# The sequence over context ranks, by both kinds of attention
CONTEXT = [
    # Documents of a few tokens: most blocks are masked in part, some are empty.
    ("documents", "llama", "zero1", DOCUMENTS),
    ("ring-documents", "gpt2", "ring", DOCUMENTS),
    # Biases by distance, from positions that other ranks' keys have in the queries' documents.
    ("alibi", "bloom", "tp2 ring", DOCUMENTS),
    # The window ends within a chunk, and leaves blocks out.
    ("ring-window-zero3", "mistral", "ring zero3", {}),
    # One key/value head, shared by the tensor ranks; S / context / tensor tokens between the blocks.
    ("sequence", "llama-tied-kv1", "tp2 sp", {}),
    ("ring-sequence", "gpt2", "tp2 sp ring", {}),
    ("ring-pipeline", "llama", "pp2 ring", DOCUMENTS),
    # Rotations by type of block, on each stage; sinks, with each kind of attention.
    ("ropes-pipeline-documents", "gemma3_text", "pp2", DOCUMENTS),
    ("ring-sinks-documents", "gpt_oss", "tp2 ring", DOCUMENTS),
    ("sinks-experts-zero3", "gpt_oss", "dp2 ep2 zero3", {}),
    # Experts over the context ranks; a pipeline whose backward is in two parts, attention's once.
    ("ring-experts", "mixtral", "ep2 ring", {}),
    ("experts-zero3", "qwen3_moe", "dp2 ep4 zero3", DOCUMENTS),
    ("ring-zbv-zero3", "llama", "pp2 v ring zero3", {"schedule": "zbv"} | DOCUMENTS),
]

# Wherever experts lie; their balance loss is in it
EXPERTS = [
    *("cp2-ep2", "cp2-ep2-zero1", "dp2-ep2", "dp2-ep2-zero2", "dp4-ep4-zero1", "dp4-ep2-zero3"),
    *("tp2-dp2-ep2-zero2-sp", "tp2-pp2-sp", "pp2-dp2-ep2-zero1", "cp2-dp2-ep4-zero1"),
    *("cp2-tp2-ep2-zero3-sp", "pp2-dp2-ep2-zero3", "tp2", "tp4-sp", "dp4-zero3", "dp4-ep2", "dp4-ep4"),
    *("dp4-ep2-zero1-copies2", "dp4-ep2-zero2", "tp2-dp2-ep2", "tp2-dp2-ep2-zero3", "tp2-pp2"),
    *("pp2-dp2-ep2", "tp2-pp2-dp2-ep2-zero1-sp"),
]

# Adapters on stacks of experts along each axis that cuts the stacks
STACKS = {"r": 3, "lora_alpha": 6, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
DOWN = {"r": 2, "target_modules": [], "target_parameters": ["experts.down_proj"], "use_rslora": True}
ON_EXPERTS = [
    ("mixtral", STACKS, "tp2 dp2 ep2 zero2 sp"),
    ("glm4_moe", STACKS, "cp2 ep2 zero1"),
    ("qwen3_moe", STACKS, "tp2 dp2 zero3"),
    ("qwen2_moe", STACKS, "pp2 tp2"),
    ("mixtral", DOWN, "dp4 ep2 zero3"),
    ("mixtral", DOWN, "tp4"),
    ("gpt_oss", STACKS, "tp2 dp2 ep2 zero2 sp"),
]
LAST = {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "o_proj"], "layers_to_transform": [4]}
FROZEN_STAGES = {"lora": LAST, "clip": 1e-3}

# Multi-token prediction: two blocks predict two and three tokens ahead
DEEPSEEK, GLM = config("deepseek_v3", mtp=True, num_nextn_predict_layers=2), config("glm4_moe", mtp=True)
FOUR = {"num_hidden_layers": 4}
MTP = [
    (DEEPSEEK, "tp4", {}),
    (DEEPSEEK, "tp2 cp2 sp", DOCUMENTS),
    (DEEPSEEK, "dp2 ep2 zero3", {}),
    (DEEPSEEK, "pp2 dp2 zero3", {"checkpointing": "full"}),
    (DEEPSEEK, "pp2 cp2 zero1", {"chunk": 5}),
    (DEEPSEEK, "pp2 loop2", {"schedule": "interleaved"}),
    (GLM, "tp2 pp2 sp", {}),
    (GLM, "tp2 dp2 ep2 zero2", {}),
    (GLM | {"tie_word_embeddings": True}, "tp2 pp2", {}),
    (DEEPSEEK | FOUR, "pp2 v", {"schedule": "dualpipev", "samples": 8}),
    (DEEPSEEK | FOUR, "pp2 loop2 dp2 zero3", {"schedule": "interleaved-zero-bubble", "samples": 8}),
]

# Several stages a rank, by name: the model, the layout beside the pipeline, the rest of the case
WITH = {
    "lora": ("llama-tied", "", ADAPTERS),
    "lora-zero3": ("llama", "dp2 zero3", ADAPTERS | {"samples": 8}),
    "all-frozen": ("llama", "", FROZEN_STAGES),
    "all-frozen-zero2": ("llama", "dp2 zero2", FROZEN_STAGES | {"samples": 8}),
    "all-frozen-replicas": ("llama", "dp2 copies2 zero2", FROZEN_STAGES | {"samples": 8}),
    "replicas-of-shards": ("llama", "dp4 copies2 zero3", {"samples": 16}),
    "offload": ("llama", "dp2 zero3", {"offload": True, "samples": 8}),
    "experts": ("mixtral", "dp2 ep2 zero1", {"samples": 8}),
    "context": ("llama", "cp2", DOCUMENTS),
    "llama-tied": ("llama-tied", "tp2", DOCUMENTS),
    "gpt2": ("gpt2", "tp2 sp", DOCUMENTS),
}
#: Of three choices, and of eight ranks.
ALWAYS = (("all-frozen-replicas", "zbv"), ("replicas-of-shards", "interleaved-zero-bubble"))
TRANSPOSED = config("gpt_oss", num_hidden_layers=4, layer_types=["full_attention"] * 4)

# Three tensor ranks: the vocabulary is padded as the layout needs
THREE = [
    ("tied", "llama-of-three", "", {"asks": SLOW}),
    ("untied", "llama-of-three-untied", "", {"asks": SLOW}),
    ("tied-sequence", "llama-of-three", "sp", {"length": 18}),
    ("logits-in-chunks", "llama-of-three-untied", "", {"chunk": 8}),
    ("tied-lora", "llama-of-three", "", ADAPTERS),
    ("tied-at-both-ends", "llama-of-three", "pp2", {"asks": SLOW}),
    ("tied-zero3", "llama-of-three", "dp2 zero3", {"asks": SLOW}),
]

ROWS = [row(f"context-{why}", name, f"cp2 {cut}", asks=SLOW, **more) for why, name, cut, more in CONTEXT]
for model in ("mixtral", "qwen3_moe", "glm4_moe"):
    ROWS += [row(f"experts-{model}-{layout}", model, layout, asks=SLOW) for layout in EXPERTS]
for number, (model, lora, layout) in enumerate(ON_EXPERTS):
    asks = SLOW if number else {}
    ROWS.append(row(f"lora-on-experts-{number}-{model}", model, layout, lora=lora, clip=1e-3, asks=asks))
for number, (model, layout, more) in enumerate(MTP):
    ROWS.append(row(f"mtp-{number}", model, layout, mtp=0.3, asks=SLOW, **more))
for name, stages in SCHEDULES.items():
    cut, eight = f"pp2 dp2 ep2 zero2 {stages}", {"schedule": name, "samples": 8}
    ROWS.append(row(f"experts-{name}", "mixtral", cut, asks=SLOW, **eight))
    for what, (model, layout, more) in WITH.items():
        asks, cut = {} if (what, name) in ALWAYS else SLOW, f"pp2 {stages} {layout}"
        ROWS.append(row(f"stages-{what}-{name}", model, cut, schedule=name, asks=asks, **more))
for why, name, layout, more in THREE:
    ROWS.append(row(f"three-{why}", config(name, layers=3), f"tp3 {layout}", **more))
# The experts are gathered by hooks of their own, again where a block is computed again.
for mode in ("selective", "full"):
    ROWS.append(row(f"experts-gathered-again-{mode}", "mixtral", "dp2 ep2 zero3", mode, micro_batch=2))
ROWS += [
    # Stacks and biases of fewer experts than ranks are cut along their width.
    row("experts-cut-along-their-width", "gpt_oss", "dp3 zero3", samples=6, asks=SLOW),
    row("the-output-layer-alone-in-a-chunked-loss", "llama", "dp2 zero3", chunk=5, **HEAD_ALONE),
    # Most blocks have no adapter.
    row("lora-a-stage-without-zero1", "llama-tied", "pp2 dp2 zero1", **FROZEN_STAGES),
    row("lora-blocks-without-zero2", "llama", "dp2 zero2", **FROZEN_STAGES),
    # The last stage uses the embedding three times, in a backward of two parts.
    row("mtp-tied-zbv", GLM | FOUR | {"tie_word_embeddings": True}, "pp2 v", schedule="zbv", mtp=0.3),
    row("mtp-two-stages", DEEPSEEK, "tp2 pp2 sp", documents=True, mtp=0.3),
    # GPT-OSS multiplies by transposed stacks of experts, and autograd gives gradients transposed as well.
    row("gradients-of-transposed-stacks", TRANSPOSED, "pp2 v", schedule="zbv"),
]
LAYOUTS = Layouts(ROWS)
test_layouts_of_several_choices_equal_one_device = LAYOUTS.equal_one_device()
test_layouts_of_several_choices_send_what_is_planned = LAYOUTS.send_what_is_planned()


def test_training_adapters_leaves_the_base_as_it_was_to_the_bit():
    (outcome,) = one_device([Case(MODELS["llama"], lora=LORA, clip=1e-3)])
    for name, before in outcome.initial.items():
        moved = not torch.equal(before, outcome.parameters[name])
        assert moved == (".lora_" in name) == (name in outcome.gradients), name
