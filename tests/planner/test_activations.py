"""Compare the planned bytes of a block's backward with those that autograd saves in a real block."""

import pytest
import torch
from support.configs import TINIEST_LLAMA, TINY_GPT2
from trilith.layers import Attention, attention_kinds, cost_of, masks_cost
from trilith.models import FAMILIES, LoraConfig, adapted, family_of
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.planner import Work, rank_parameters

LENGTH = 32
LLAMA = {key: value for key, value in TINIEST_LLAMA.items() if not key.startswith("tie")} | {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 1,
}
GPT2 = TINY_GPT2 | {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 1,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
GLM = LLAMA | {
    "model_type": "glm4_moe",
    "first_k_dense_replace": 0,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
GEMMA2 = LLAMA | {"model_type": "gemma2", "head_dim": 16, "tie_word_embeddings": True}
GEMMA3 = GEMMA2 | {"model_type": "gemma3_text", "sliding_window": 8}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 8}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 16}
OLMO2 = LLAMA | {"model_type": "olmo2"}
OLMO3 = LLAMA | {"model_type": "olmo3", "sliding_window": 8}
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss",
    "head_dim": 16,
    "intermediate_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "sliding_window": 8,
}
COHERE = LLAMA | {"model_type": "cohere", "use_qk_norm": True}
COHERE2 = LLAMA | {"model_type": "cohere2", "sliding_window": 8}
STABLELM = LLAMA | {"model_type": "stablelm", "partial_rotary_factor": 0.25}
STABLELM_12B = STABLELM | {"qk_layernorm": True, "use_parallel_residual": True}
GEMMA = LLAMA | {"model_type": "gemma", "head_dim": 16}
GRANITE = LLAMA | {"model_type": "granite", "residual_multiplier": 0.5}
EXAONE4 = LLAMA | {"model_type": "exaone4", "sliding_window": 8}
SEED_OSS = LLAMA | {"model_type": "seed_oss", "head_dim": 16, "attention_dropout": 0.0}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
PHI3 = LLAMA | {"model_type": "phi3", "pad_token_id": 0}
STARCODER2 = LLAMA | {"model_type": "starcoder2"}
QWEN2_MOE = LLAMA | {
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
GPT_NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {
    "model_type": "gpt_neox"
}
DEEPSEEK = {
    **{key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
    "model_type": "deepseek_v2",
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 96,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
GPTJ = {key: value for key, value in GPT2.items() if key != "model_type"} | {
    "model_type": "gptj",
    "rotary_dim": 8,
}
PHI = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"model_type": "phi"}
FALCON = {
    "model_type": "falcon",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
OPT = FALCON | {"model_type": "opt", "ffn_dim": 224, "dropout": 0.0}
BLOOM = {"model_type": "bloom", "vocab_size": 128, "hidden_size": 64, "n_layer": 1, "n_head": 4}
QWEN3_NEXT = QWEN2_MOE | {
    "model_type": "qwen3_next",
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}
QWEN3_5 = {key: QWEN3_NEXT[key] for key in QWEN3_NEXT if "expert" not in key and not key.startswith("moe")}
QWEN3_5 |= {"model_type": "qwen3_5_text"}
GRANITE_4 = LLAMA | {
    "model_type": "granitemoehybrid",
    "num_local_experts": 4,
    "intermediate_size": 96,
    "mamba_n_heads": 4,
    "shared_intermediate_size": 128,
    "mamba_d_state": 16,
}
FULL = {"layer_types": ["full_attention"]}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
EVERY = LoraConfig(r=4)
STACKS = LoraConfig(r=4, target_parameters=("experts.gate_up_proj", "experts.down_proj"))


def saved(config, lora):
    """Return the bytes that one block saves, without parameters, rotations and masks, and the plan's."""
    family = family_of(config)
    if lora is not None:
        family = adapted(family, lora)
    made = family.from_hf(config)
    model = family.build(made, device="cpu")
    initialize(model, 0)
    tokens = Work(ParallelState.alone(), made.hidden_size, LENGTH, 2, 1, fused=False).tokens
    found = {}
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    (block,) = model.layers.values()
    forward = block.forward

    def watched(x_BSD, *more):
        x_BSD = x_BSD.detach().requires_grad_()  # as after another block
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return forward(x_BSD, *more)

    block.forward = watched
    out = model(torch.zeros(2, LENGTH, dtype=torch.long))
    assert out.requires_grad
    shared = sum(cost_of(one, tokens).kept for one in model.rotary.values())
    for layer in attention_kinds(block):
        # Blocks of scores keep their mask where autograd does not see it.
        if isinstance(layer, Attention) and layer.planned_backend(tokens) == "sdpa":
            shared += masks_cost(layer, tokens).kept
    return sum(found.values()) - shared, cost_of(block, tokens).kept


CASES = [
    pytest.param(LLAMA, None, id="llama"),
    pytest.param(MIXTRAL, None, id="mixtral"),
    pytest.param(GLM, None, id="glm4_moe"),
    pytest.param(GEMMA2, None, id="gemma2"),
    pytest.param(GEMMA2 | NO_CAPS, None, id="gemma2-no-caps"),
    pytest.param(GEMMA3, None, id="gemma3-window-head-norms"),
    pytest.param(GEMMA3 | {"sliding_window_pattern": 1}, None, id="gemma3-head-norms"),
    pytest.param(MISTRAL, None, id="mistral-window"),
    pytest.param(QWEN3, None, id="qwen3-head-norms"),
    pytest.param(OLMO2, None, id="olmo2"),
    pytest.param(OLMO3, None, id="olmo3-window"),
    pytest.param(GPT_OSS, None, id="gpt_oss-window"),
    pytest.param(GPT_OSS | {"sliding_window": None}, None, id="gpt_oss"),
    pytest.param(GPT_OSS, STACKS, id="gpt_oss-lora-of-experts"),
    pytest.param(LLAMA | {"model_type": "qwen2"}, None, id="qwen2"),
    pytest.param(QWEN3_MOE, None, id="qwen3_moe"),
    pytest.param(LLAMA | {"model_type": "smollm3"}, None, id="smollm3"),
    pytest.param(LLAMA | {"model_type": "glm4", "head_dim": 16}, None, id="glm4"),
    pytest.param(SEED_OSS, None, id="seed_oss-dropout"),
    pytest.param(EXAONE4, None, id="exaone4-window"),
    pytest.param(COHERE, None, id="cohere-head-norms"),
    pytest.param(COHERE2, None, id="cohere2"),
    pytest.param(STABLELM, None, id="stablelm"),
    pytest.param(STABLELM_12B, None, id="stablelm-parallel"),
    pytest.param(GEMMA, None, id="gemma"),
    pytest.param(GRANITE, None, id="granite"),
    pytest.param(PHI3, None, id="phi3"),
    pytest.param(STARCODER2, None, id="starcoder2"),
    pytest.param(QWEN2_MOE, None, id="qwen2_moe"),
    pytest.param(GPT_NEOX, None, id="gpt_neox"),
    pytest.param(GPT_NEOX | {"use_parallel_residual": False}, None, id="gpt_neox-in-turn"),
    pytest.param(GPT_NEOX | {"hidden_dropout": 0.1}, None, id="gpt_neox-dropout"),
    pytest.param(DEEPSEEK, None, id="deepseek_v2"),
    pytest.param(
        DEEPSEEK
        | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": 0},
        None,
        id="deepseek_v3",
    ),
    pytest.param(DEEPSEEK | {"q_lora_rank": None}, None, id="deepseek_v2-lite"),
    pytest.param(DEEPSEEK | {"v_head_dim": 24}, None, id="deepseek_v2-wide-values"),
    pytest.param(DEEPSEEK | {"attention_dropout": 0.1}, None, id="deepseek_v2-attention"),
    pytest.param(DEEPSEEK, EVERY, id="deepseek_v2-lora"),
    pytest.param(GPTJ, None, id="gptj"),
    pytest.param(PHI, None, id="phi"),
    pytest.param(PHI | {"qk_layernorm": True}, None, id="phi-head-norms"),
    pytest.param(FALCON, None, id="falcon-7b"),
    pytest.param(FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}, None, id="falcon-40b"),
    pytest.param(FALCON | {"alibi": True, "parallel_attn": False, "bias": True}, None, id="falcon-rw"),
    pytest.param(OPT, None, id="opt"),
    pytest.param(OPT | {"do_layer_norm_before": False}, None, id="opt-norms-after"),
    pytest.param(BLOOM, None, id="bloom"),
    pytest.param(QWEN3_NEXT, None, id="qwen3_next-delta-net"),
    pytest.param(GRANITE_4, None, id="granitemoehybrid-mamba"),
    pytest.param(GRANITE_4, STACKS, id="granitemoehybrid-lora-of-experts"),
    pytest.param(GRANITE_4 | {"mamba_n_groups": 2}, None, id="granitemoehybrid-groups"),
    pytest.param(GRANITE_4 | {"num_local_experts": 0}, None, id="granitemoehybrid-dense"),
    pytest.param(QWEN3_5, None, id="qwen3_5-delta-net"),
    pytest.param(QWEN3_NEXT | FULL, None, id="qwen3_next-attention"),
    pytest.param(QWEN3_NEXT, EVERY, id="qwen3_next-lora"),
    pytest.param(GPT2, None, id="gpt2"),
    pytest.param(GPT2 | {"resid_pdrop": 0.1}, None, id="gpt2-resid"),
    pytest.param(GPT2 | {"attn_pdrop": 0.1}, None, id="gpt2-attention"),
    pytest.param(LLAMA | {"attention_dropout": 0.1}, None, id="llama-attention"),
    pytest.param(LLAMA, EVERY, id="lora"),
    pytest.param(MIXTRAL, STACKS, id="lora-of-experts"),
    pytest.param(MIXTRAL, STACKS.model_copy(update={"target_modules": ()}), id="lora-of-experts-alone"),
    pytest.param(LLAMA, EVERY.model_copy(update={"lora_dropout": 0.05}), id="lora-dropout"),
    pytest.param(GPT2, EVERY.model_copy(update={"lora_dropout": 0.05}), id="gpt2-lora-dropout"),
    pytest.param(
        LLAMA, LoraConfig(r=4, lora_dropout=0.05, target_modules=("q_proj", "v_proj")), id="lora-of-q-and-v"
    ),
]


@pytest.mark.parametrize(("config", "lora"), CASES)
def test_what_a_block_keeps_is_what_autograd_saves(config, lora):
    found, planned = saved(config, lora)
    assert 0.99 < found / planned <= 1


def test_every_family_has_a_case():
    assert {str(case.values[0]["model_type"]) for case in CASES} == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_that_a_rank_is_planned_to_hold_are_those_that_it_builds(family):
    raw = next(case.values[0] for case in CASES if case.values[0]["model_type"] == family)
    config = FAMILIES[family].from_hf(raw)
    for layout in (Layout(), Layout.of(tensor=2, sequence=True)):
        for rank in range(layout.world):
            state = ParallelState.stand_in(layout, rank)
            model = FAMILIES[family].build(config, state=state)
            every = rank_parameters(model, state).every
            assert every.here + every.buffers == sum(one.numel() for one in model.parameters())
