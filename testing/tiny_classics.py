"""Small models of the families before Llama, for ``tiny_models``."""

from __future__ import annotations

from typing import Any

_SHARED: dict[str, Any] = {
    **{"vocab_size": 503, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "max_position_embeddings": 64, "layer_norm_eps": 1e-3},
}
CLASSICS: dict[str, dict[str, Any]] = {
    # Of each head's eight numbers four are rotated.
    "gpt_neox": {**_SHARED, "model_type": "gpt_neox", "rotary_emb_base": 5e3, "rotary_pct": 0.5},
    "gptj": {
        **{"model_type": "gptj", "vocab_size": 503, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 88},
        **{"n_positions": 64, "rotary_dim": 4, "layer_norm_epsilon": 1e-3},
    },
    "phi": {
        **{**_SHARED, "model_type": "phi", "num_key_value_heads": 2, "partial_rotary_factor": 0.75},
        **{"qk_layernorm": True},
    },
    # As Falcon 40B; the others are variants.
    "falcon": {
        **{"model_type": "falcon", "vocab_size": 503, "hidden_size": 32, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True},
        **{"ffn_hidden_size": 88, "layer_norm_epsilon": 1e-3, "max_position_embeddings": 64},
    },
    # Biases by distance; four of the twelve slopes are no numbers of bf16. One branch after the other.
    "falcon-rw": {
        **{"model_type": "falcon", "vocab_size": 503, "hidden_size": 48, "num_hidden_layers": 3},
        **{"num_attention_heads": 12, "alibi": True, "bias": True, "multi_query": False},
        **{"parallel_attn": False, "ffn_hidden_size": 90, "layer_norm_epsilon": 1e-3},
        **{"max_position_embeddings": 64},
    },
    "opt": {
        **{"model_type": "opt", "vocab_size": 503, "hidden_size": 32, "ffn_dim": 88, "dropout": 0.0},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64},
        **{"word_embed_proj_dim": 32},
    },
    # Embeddings are narrower than hidden states, and norms come after the branches.
    "opt-350m": {
        **{"model_type": "opt", "vocab_size": 503, "hidden_size": 32, "ffn_dim": 88, "dropout": 0.0},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64},
        **{"word_embed_proj_dim": 20, "do_layer_norm_before": False},
    },
    # The number of heads is no power of two: some slopes lie between others.
    "bloom": {
        **{"model_type": "bloom", "vocab_size": 503, "hidden_size": 48, "n_layer": 3, "n_head": 12},
        **{"layer_norm_epsilon": 1e-3, "seq_length": 64},
    },
}
#: As in ``tiny_models``: rows with a few fields changed.
CLASSIC_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox-in-turn": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
    ),
    "phi-plain": ("phi", {"qk_layernorm": False, "num_key_value_heads": 4}),
    "falcon-7b": ("falcon", {"new_decoder_architecture": False, "num_kv_heads": 4}),
    "falcon-11b": ("falcon", {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
    "opt-norms-after": (
        "opt",
        {"do_layer_norm_before": False, "enable_bias": False, "activation_function": "gelu"},
    ),
    "opt-wide": ("opt", {"word_embed_proj_dim": 48, "num_hidden_layers": 2}),
    "bloom-untied": ("bloom", {"tie_word_embeddings": False, "n_head": 8}),
}
