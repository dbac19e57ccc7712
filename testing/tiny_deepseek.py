"""Small DeepSeek models for tests: shrunk copies of the released configs, and rows with fields changed."""

from __future__ import annotations

from typing import Any

DEEPSEEK_YARN = {
    **{"type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0},
    "original_max_position_embeddings": 4,
}
DEEPSEEK: dict[str, dict[str, Any]] = {
    # DeepSeek-V2-Lite's config with smaller numbers; the fields of a head have widths of their own.
    "deepseek_v2": {
        **{"model_type": "deepseek_v2", "vocab_size": 503, "hidden_size": 48, "intermediate_size": 88},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 160},
        **{"q_lora_rank": None, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6},
        **{"v_head_dim": 8, "first_k_dense_replace": 1, "moe_intermediate_size": 12},
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 1},
        **{"topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-3},
        "rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        **{"rope_theta": 1e4, "tie_word_embeddings": False, "norm_topk_prob": False},
    },
    "deepseek_v3": {
        **{"model_type": "deepseek_v3", "vocab_size": 503, "hidden_size": 48, "intermediate_size": 88},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"q_lora_rank": 14, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6},
        **{"v_head_dim": 8, "first_k_dense_replace": 1, "moe_intermediate_size": 12},
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 4},
        **{"topk_group": 2, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-3},
        "rope_scaling": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        **{"rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 160},
    },
}
DEEPSEEK_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2-groups": (  # as the large one has them
        "deepseek_v2",
        {
            **{"q_lora_rank": 14, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            **{
                "n_shared_experts": 1,
                "attention_bias": True,
                "rope_scaling": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 0.4},
            },
        },
    ),
    "deepseek_v3-plain": (
        "deepseek_v3",
        {
            **{"q_lora_rank": None, "rope_interleave": False, "rope_scaling": None, "norm_topk_prob": False},
            **{"n_group": 1, "topk_group": 1, "attention_bias": True, "first_k_dense_replace": 0},
        },
    ),
    "deepseek_v2-plain": (
        "deepseek_v2",
        {"rope_scaling": None, "v_head_dim": 16, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    ),
}
