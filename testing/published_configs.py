"""Published configs with every key of their files, but smaller numbers and fp32, for tests."""

from __future__ import annotations

from typing import Any

PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-3-1b": {
        **{"architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
        **{"attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid"},
        **{"eos_token_id": [1, 106], "rope_scaling": {"factor": 1.0, "type": "linear"}},
        **{"final_logit_softcapping": None, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"},
        **{"hidden_size": 36, "initializer_range": 0.02, "intermediate_size": 72},
        **{"max_position_embeddings": 128, "model_type": "gemma3_text", "num_attention_heads": 4},
        **{"num_hidden_layers": 7, "num_key_value_heads": 1, "pad_token_id": 0},
        **{"query_pre_attn_scalar": 16, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000},
        # Transformers 5 knows the second name of the window alone.
        **{"rope_theta": 1000000, "sliding_window_attention_size": 9, "sliding_window": 9},
        "sliding_window_pattern": 6,
        "global_local_attention_pattern": [*["SLIDING_LOCAL"] * 5, "GLOBAL"],
        **{"torch_dtype": "float32", "transformers_version": "4.50.0.dev0", "use_cache": True},
        **{"vocab_size": 503, "use_res_clamp": False},
    },
    "olmo-3-7b": {
        **{"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "hidden_size": 48},
        **{"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"intermediate_size": 88, "vocab_size": 503, "max_position_embeddings": 64},
        **{"rope_theta": 500000, "sliding_window": 9, "rms_norm_eps": 1e-06, "torch_dtype": "float32"},
        **{"tie_word_embeddings": False, "pad_token_id": 277, "hidden_act": "silu"},
        **{"attention_bias": False, "attention_dropout": 0.0, "use_cache": True},
    },
    "gpt-oss-20b": {
        **{"architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0},
        **{"eos_token_id": 202, "experts_per_token": 4, "head_dim": 8, "hidden_act": "silu"},
        **{"hidden_size": 48, "initial_context_length": 16, "initializer_range": 0.02},
        **{"intermediate_size": 48, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"max_position_embeddings": 512, "model_type": "gpt_oss", "num_attention_heads": 8},
        **{"num_experts_per_tok": 4, "num_hidden_layers": 4, "num_key_value_heads": 2},
        **{"num_local_experts": 8, "output_router_logits": False, "pad_token_id": 199},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0},
            **{"original_max_position_embeddings": 16, "rope_theta": 150000, "rope_type": "yarn"},
            "truncate": False,
        },
        **{"rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 9, "swiglu_limit": 7.0},
        **{"tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True},
        "vocab_size": 503,
    },
    "deepseek-v2-lite": {
        **{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
        **{"aux_loss_alpha": 0.001, "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 1},
        **{"hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02, "intermediate_size": 88},
        **{"kv_lora_rank": 20, "max_position_embeddings": 640, "model_type": "deepseek_v2"},
        **{"moe_intermediate_size": 12, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 8},
        **{"n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 4},
        **{"num_experts_per_tok": 6, "num_hidden_layers": 3, "num_key_value_heads": 4},
        **{"pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 40.0, "mscale": 0.707},
            **{"mscale_all_dim": 0.707, "original_max_position_embeddings": 16, "rope_theta": 10000},
            "type": "yarn",
        },
        **{"rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True},
        **{"tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy"},
        **{"torch_dtype": "float32", "transformers_version": "4.33.1", "use_cache": True},
        **{"v_head_dim": 16, "vocab_size": 503},
    },
}
