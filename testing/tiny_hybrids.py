"""Rows of ``tiny_models`` for hybrids, in which some blocks are recurrent and others have attention."""

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
}
HYBRID_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next-types": (
        "qwen3_next",
        {
            **{**_OTHER_TYPES, "num_key_value_heads": 4, "norm_topk_prob": False},
            **{"decoder_sparse_step": 2, "mlp_only_layers": []},
        },
    ),
    "qwen3_5_text-types": ("qwen3_5_text", _OTHER_TYPES | {"num_key_value_heads": 1}),
}
