"""Small models for tests.

``MODELS`` are of every family, with shapes that hide nothing, to compare layouts with. The smaller ones are
for whole runs, in which the model is not what is tested.
"""

from __future__ import annotations

from typing import Any

from .tiny_classics import CLASSICS
from .tiny_deepseek import DEEPSEEK
from .tiny_hybrids import HYBRIDS
from .tiny_ropes import LLAMA3, LONGROPE, ROPES, YARN

#: The heads' width is not the hidden size; all biases, an odd vocabulary, a rope that is not the default.
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 503,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_scaling": LLAMA3,
    "attention_bias": True,
    "mlp_bias": True,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
}
SIXES = {"intermediate_size": 90, "num_attention_heads": 6, "num_key_value_heads": 2}
PLAIN = {key: value for key, value in LLAMA.items() if not key.endswith("_bias")}
#: Without a width of the heads: it is the hidden size by their number.
WHOLE = {key: value for key, value in PLAIN.items() if key != "head_dim"} | {"num_hidden_layers": 3}
LAYER_NORM = {key: value for key, value in WHOLE.items() if key != "rms_norm_eps"} | {"layer_norm_eps": 1e-3}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    #: Heads and widths that 2, 3 and 6 divide, with a vocabulary that none of them does.
    "llama-of-three": {**LLAMA, "tie_word_embeddings": True} | SIXES,
    "llama-of-three-untied": {**LLAMA, **SIXES},
    "llama-kv1": {**LLAMA, "num_key_value_heads": 1},
    "llama-tied-kv1": {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 1},
    # The window is shorter than the sequence; Qwen has its biases by itself and no other.
    "mistral": {**PLAIN, "model_type": "mistral", "sliding_window": 5},
    "qwen2": {**PLAIN, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**PLAIN, "model_type": "qwen3"},
    "qwen3-kv1": {**PLAIN, "model_type": "qwen3", "num_key_value_heads": 1},
    "mixtral": {
        **PLAIN,
        "model_type": "mixtral",
        "num_hidden_layers": 4,
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
    "qwen3_moe": {
        **PLAIN,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "moe_intermediate_size": 12,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
    },
    # One block without experts; groups of two experts; half of each head is rotated.
    "glm4_moe": {
        **PLAIN,
        "model_type": "glm4_moe",
        "num_hidden_layers": 4,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    # The window is shorter than the sequence; the caps are low enough to bend scores and logits.
    "gemma2": {
        **PLAIN,
        "model_type": "gemma2",
        "rope_scaling": None,
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 1.5,
        "tie_word_embeddings": True,
    },
    # Blocks with a window and without one are rotated differently.
    "gemma3_text": {
        **{**PLAIN, "model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window": 5},
        **{"sliding_window_pattern": 2, "rope_theta": 5e3, "rope_local_base_freq": 300.0},
        **{"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "query_pre_attn_scalar": 12},
        **{"final_logit_softcapping": 1.5, "tie_word_embeddings": True},
    },
    "qwen2_moe": {
        **{**PLAIN, "model_type": "qwen2_moe", "num_hidden_layers": 3, "head_dim": 12, "num_experts": 8},
        **{"num_experts_per_tok": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
        **{"mlp_only_layers": [1], "norm_topk_prob": True},
    },
    **HYBRIDS,
    "gemma": {**PLAIN, "model_type": "gemma", "rope_scaling": None, "num_hidden_layers": 3},
    "granite": {
        **{**WHOLE, "model_type": "granite", "mlp_bias": True, "num_key_value_heads": 1},
        **{"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7},
        "logits_scaling": 2.0,
    },
    "olmo2": {**WHOLE, "model_type": "olmo2", "rope_scaling": None, "rope_theta": 5e3},
    "olmo3": {
        **{**WHOLE, "model_type": "olmo3", "rope_scaling": None, "rope_parameters": ROPES},
        **{"num_hidden_layers": 4, "sliding_window": 5},
    },
    "glm4": {**WHOLE, "model_type": "glm4", "partial_rotary_factor": 0.5, "head_dim": 8},
    "seed_oss": {
        **{**PLAIN, "model_type": "seed_oss", "num_hidden_layers": 3, "attention_out_bias": True},
        **{"attention_dropout": 0.0, "residual_dropout": 0.0},
    },
    # Blocks with a window alone are rotated.
    "exaone4": {
        **{**PLAIN, "model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 5},
        **{"sliding_window_pattern": 2, "rope_theta": 5e3},
    },
    "smollm3": {**WHOLE, "model_type": "smollm3", "no_rope_layers": [0, 1, 0]},
    # Half of each head is rotated; past 16 tokens with the long factors.
    "phi3": {
        **{**WHOLE, "model_type": "phi3", "partial_rotary_factor": 0.5, "rope_scaling": LONGROPE},
        **{"original_max_position_embeddings": 16, "sliding_window": 11},
    },
    "starcoder2": {
        **{key: value for key, value in WHOLE.items() if key != "rms_norm_eps"},
        **{
            "model_type": "starcoder2",
            "norm_epsilon": 1e-3,
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
        **{"num_key_value_heads": 1, "hidden_act": "gelu"},
    },
    "stablelm": {
        **{**LAYER_NORM, "model_type": "stablelm", "use_qkv_bias": True, "qk_layernorm": True},
        **{"partial_rotary_factor": 0.5, "rope_scaling": None},
    },
    "cohere": {
        **{**LAYER_NORM, "model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.6},
        **{"rope_scaling": None, "tie_word_embeddings": True},
    },
    "cohere2": {
        **{**LAYER_NORM, "model_type": "cohere2", "logit_scale": 0.6, "num_hidden_layers": 5},
        **{"rope_scaling": None, "tie_word_embeddings": True, "sliding_window": 9},
    },
    # The limit cuts many numbers off; sinks weigh as much as scores.
    "gpt_oss": {
        **{**PLAIN, "model_type": "gpt_oss", "num_hidden_layers": 4, "intermediate_size": 24},
        **{"rope_scaling": YARN | {"truncate": False}, "rope_theta": 3e3, "sliding_window": 5},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.4, "swiglu_alpha": 1.2},
        **{"output_router_logits": True, "router_aux_loss_coef": 0.1},
    },
    **DEEPSEEK,
    "gpt2": {
        "model_type": "gpt2",
        "layer_norm_epsilon": 1e-3,
        "vocab_size": 503,
        "n_embd": 48,
        "n_layer": 5,
        "n_head": 4,
        "n_positions": 64,
        "n_inner": 88,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    **CLASSICS,
}
#: Of these, the models with experts.
EXPERTS = {name for name, raw in MODELS.items() if "num_experts_per_tok" in raw}

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "attention_bias": True,
}

TINY_MIXTRAL: dict[str, Any] = {
    **{key: value for key, value in TINY_LLAMA.items() if not key.endswith(("_bias", "_embeddings"))},
    "model_type": "mixtral",
    "max_position_embeddings": 64,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}

TINY_GLM: dict[str, Any] = {
    **{key: value for key, value in TINY_LLAMA.items() if not key.endswith("_embeddings")},
    "model_type": "glm4_moe",
    "max_position_embeddings": 64,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 2,
    "use_qk_norm": True,
}

TINY_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 131,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
}

#: Two blocks, and an output layer that is the embedding.
TINIEST_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
