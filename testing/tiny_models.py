"""Small models for tests.

``MODELS`` are of every family, with shapes that hide nothing, to compare layouts with. The smaller ones are
for whole runs, in which the model is not what is tested.
"""

from __future__ import annotations

from typing import Any

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
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}
SIXES = {"intermediate_size": 90, "num_attention_heads": 6, "num_key_value_heads": 2}
PLAIN = {key: value for key, value in LLAMA.items() if not key.endswith("_bias")}
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
    "gpt2": {
        "model_type": "gpt2",
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
}
#: Of these, the models with experts.
EXPERTS = {name for name in MODELS if name in ("mixtral", "qwen3_moe", "glm4_moe")}

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
