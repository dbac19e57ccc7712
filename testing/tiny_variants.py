"""List the rows of ``tiny_models`` with a few fields changed, for what else their families compute.

They are compared with transformers alone, on one device.
"""

from __future__ import annotations

from typing import Any

from .tiny_classics import CLASSIC_VARIANTS
from .tiny_deepseek import DEEPSEEK_VARIANTS
from .tiny_hybrids import HYBRID_VARIANTS
from .tiny_ropes import ROPE_VARIANTS, ROPES, YARN

#: By name: the row, and the fields that differ from it.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **DEEPSEEK_VARIANTS,
    "llama-multi-head": ("llama", {"num_key_value_heads": 4, "mlp_bias": False}),
    "llama-theta": ("llama", {"rope_scaling": None, "rope_theta": 5e5, "hidden_act": "gelu_pytorch_tanh"}),
    **ROPE_VARIANTS,
    "qwen2_moe-some": ("qwen2_moe", {"qkv_bias": False, "mlp_only_layers": [], "decoder_sparse_step": 2}),
    **HYBRID_VARIANTS,
    "gemma2-gelu": ("gemma2", {"hidden_activation": "gelu"}),
    "gemma-untied": (
        "gemma",
        {"tie_word_embeddings": False, "attention_bias": True, "hidden_act": "gelu_new"},
    ),
    "granite-tied": ("granite", {"tie_word_embeddings": True, "attention_bias": True, "hidden_act": "gelu"}),
    "olmo2-tied": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1}),
    "olmo3-keys": (
        "olmo3",
        {
            **{"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 3e3, "rope_local_base_freq": 5e5},
            **{"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1},
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "gpt_oss-plain": (
        "gpt_oss",
        {
            **{"rope_scaling": {"rope_type": "default"}, "attention_bias": False, "sliding_window": 40},
            **{"tie_word_embeddings": True, "num_key_value_heads": 1, "num_experts_per_tok": 3},
        },
    ),
    "gpt_oss-layers": (
        "gpt_oss",
        {
            **{"rope_scaling": None, "rope_theta": 150000.0, "num_local_experts": 6},
            "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
        },
    ),
    "glm4-plain": (
        "glm4",
        {
            **{"attention_bias": False, "partial_rotary_factor": 1.0, "tie_word_embeddings": True},
            **{"rope_scaling": None, "rope_theta": 5e3, "hidden_act": "gelu"},
        },
    ),
    "seed_oss-plain": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": False, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "exaone4-layers": (
        "exaone4",
        {"layer_types": ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "exaone4-no-window": (
        "exaone4",
        {
            **{"sliding_window": None, "layer_types": ["full_attention"] * 4, "rope_scaling": None},
            **{"tie_word_embeddings": True, "num_key_value_heads": 1},
        },
    ),
    "smollm3-interval": (
        "smollm3",
        {
            **{"no_rope_layers": None, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
            **{"attention_bias": True, "mlp_bias": True},
        },
    ),
    "phi3-short": ("phi3", {"original_max_position_embeddings": 64, "tie_word_embeddings": True}),
    "phi3-plain": (
        "phi3",
        {"rope_scaling": None, "rope_theta": 5e3, "hidden_act": "gelu", "num_key_value_heads": 4},
    ),
    "starcoder2-plain": (
        "starcoder2",
        {"use_bias": False, "tie_word_embeddings": False, "sliding_window": None},
    ),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "tie_word_embeddings": True}),
    "stablelm-plain": ("stablelm", {"use_qkv_bias": False, "qk_layernorm": False, "rope_theta": 5e3}),
    "cohere-plain": ("cohere", {"use_qk_norm": False, "attention_bias": True, "tie_word_embeddings": False}),
    "cohere2-layers": (
        "cohere2",
        {
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
            "attention_bias": True,
        },
    ),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "activation_function": "relu"}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-wide-window": ("mistral", {"sliding_window": 40, "tie_word_embeddings": True}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "mixtral-window": ("mixtral", {"sliding_window": 7, "num_experts_per_tok": 1}),
    "qwen3_moe-some": (
        "qwen3_moe",
        {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 2},
    ),
    "qwen3_moe-biases": ("qwen3_moe", {"attention_bias": True, "tie_word_embeddings": True}),
    "glm4_moe-plain": (
        "glm4_moe",
        {"use_qk_norm": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    "glm4_moe-all": ("glm4_moe", {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0}),
    "gemma2-no-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma3-layers": (
        "gemma3_text",
        {
            **{"layer_types": ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"]},
            **{"rope_parameters": ROPES, "rope_theta": 5e3, "rope_scaling": None},
            **{"rope_local_base_freq": 300.0, "final_logit_softcapping": None},
            **{"attention_bias": True, "tie_word_embeddings": False, "hidden_activation": "gelu"},
        },
    ),
    "gemma2-layers": (
        "gemma2",
        {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2, "attention_bias": True},
    ),
    **CLASSIC_VARIANTS,
}
