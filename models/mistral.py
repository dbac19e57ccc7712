"""Mistral, whose tokens see the last ``sliding_window`` tokens alone, and Mixtral, with experts."""

from typing import ClassVar

from .base.family import Family
from .base.keys import NO, YES, ZERO, Epsilon, Experts, Factor, Fixed, Whole
from .base.names import per_expert
from .expert_block import ExpertsConfig
from .llama import LLAMA_NAMES, LlamaBlock, LlamaConfig, decoder


class MistralConfig(LlamaConfig):
    """List the fields of a Mistral config.json; ``sliding_window`` null: no window (from version 0.2 on)."""

    FIXED: ClassVar[Fixed] = dict.fromkeys(("attention_bias", "mlp_bias"), NO)

    num_key_value_heads: Whole = 8
    max_position_embeddings: Whole = 131072
    sliding_window: Whole | None = 4096


class MistralBlock(LlamaBlock):
    """Compute a block of Mistral or Mixtral. Source: Jiang et al. 2023, 2024.

    x = x + attention(attention_norm(x))    * a window
    x = x + mlp(mlp_norm(x))                * Mixtral: experts
    """


MISTRAL = Family("mistral", "MistralForCausalLM", MistralConfig, decoder(MistralBlock), LLAMA_NAMES)


class MixtralConfig(MistralConfig, ExpertsConfig):
    """List the fields of a Mixtral config.json."""

    FIXED: ClassVar[Fixed] = {
        "router_jitter_noise": ZERO,
        "norm_topk_prob": YES,
        "scoring_func": ("softmax",),
    }

    num_local_experts: Experts = 8
    num_experts_per_tok: Whole = 2
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: Factor = 1e6
    sliding_window: Whole | None = None


MIXTRAL_NAMES = LLAMA_NAMES.but(
    {
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.gate": per_expert("block_sparse_moe.experts.{e}.w1.weight"),
        "mlp.experts.up": per_expert("block_sparse_moe.experts.{e}.w3.weight"),
        "mlp.experts.down": per_expert("block_sparse_moe.experts.{e}.w2.weight"),
    }
)

MIXTRAL = Family("mixtral", "MixtralForCausalLM", MixtralConfig, decoder(MistralBlock), MIXTRAL_NAMES)
