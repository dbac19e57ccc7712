"""List the rows of ``tiny_models`` for hybrids, where some blocks are recurrent and others have attention."""

from __future__ import annotations

from typing import Any

_SMALL: dict[str, Any] = {
    **{"vocab_size": 503, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
    **{"rope_scaling": None, "rope_theta": 5e3, "rms_norm_eps": 1e-3, "tie_word_embeddings": False},
}
#: Two value heads a key head; half of each attention head is rotated.
_DELTA_NET: dict[str, Any] = {
    **{"partial_rotary_factor": 0.5, "attention_bias": True, "full_attention_interval": 2},
    **{"linear_conv_kernel_dim": 3, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
    **{"linear_key_head_dim": 6, "linear_value_head_dim": 5},
}
#: Two blocks with attention to one with a delta net, and one value head a key head.
_OTHER_TYPES: dict[str, Any] = {
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
    **{"tie_word_embeddings": True, "attention_bias": False, "linear_num_value_heads": 4},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    # One block without experts.
    "qwen3_next": {
        **{**_SMALL, **_DELTA_NET, "model_type": "qwen3_next", "mlp_only_layers": [2]},
        **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_5_text": {**_SMALL, **_DELTA_NET, "model_type": "qwen3_5_text"},
    "granitemoehybrid": {
        **{key: value for key, value in _SMALL.items() if key not in ("head_dim", "intermediate_size")},
        **{"model_type": "granitemoehybrid", "intermediate_size": 12, "shared_intermediate_size": 20},
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        # Groups of four heads, which two ranks and four ranks have to share.
        **{"num_local_experts": 4, "num_experts_per_tok": 3, "mamba_n_heads": 12, "mamba_d_head": 8},
        **{
            "mamba_n_groups": 3,
            "mamba_d_state": 6,
            "mamba_d_conv": 3,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
        },
        **{"residual_multiplier": 0.7, "logits_scaling": 2.0},
    },
}
HYBRID_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next-types": (
        "qwen3_next",
        {
            **{**_OTHER_TYPES, "num_key_value_heads": 4, "norm_topk_prob": False},
            **{"decoder_sparse_step": 2, "mlp_only_layers": []},
        },
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {
            **{"num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True},
            **{"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
            **{"mamba_expand": 4, "mamba_d_head": 16, "mamba_conv_bias": False, "mamba_proj_bias": True},
            "mamba_n_groups": 1,
            **{"tie_word_embeddings": True, "num_key_value_heads": 4},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "qwen3_5_text-types": ("qwen3_5_text", _OTHER_TYPES | {"num_key_value_heads": 1}),
}
