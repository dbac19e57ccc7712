"""GPT-OSS: experts that are biased and clamped, a sink for each head, a window in every other block."""

from collections.abc import Mapping
from typing import Any, ClassVar

from ..layers import ClampedExperts, MoE
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import YES, Count, Epsilon, Experts, Factor, Fixed, HeadDim, Whole, names
from .base.parts import router
from .expert_block import ExpertsConfig
from .layer_types import LayerTypesConfig
from .llama import LLAMA_NAMES, LlamaBlock, decoder

NAMES = LLAMA_NAMES.but(
    {
        "attention.sinks.weight": "self_attn.sinks",
        "mlp.router": "mlp.router",
        "mlp.router.logit_bias": "mlp.router.bias",
        # (experts, hidden, 2 x width) there and here: even columns are the gate's.
        "mlp.experts.gate_up": "mlp.experts.gate_up_proj",
        "mlp.experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down": "mlp.experts.down_proj",
        "mlp.experts.down_bias": "mlp.experts.down_proj_bias",
    }
)
#: The rotation where a config states none; the numbers are transformers'.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssConfig(LayerTypesConfig, ExpertsConfig):
    """List the fields of a GPT-OSS config.json."""

    FIXED: ClassVar[Fixed] = {
        "hidden_act": ("silu",),  # the gate's sigmoid has a factor of its own
        "mlp_bias": YES,
    }
    READ: ClassVar[frozenset[str]] = names("experts_per_token initial_context_length")

    vocab_size: Count = 201088
    num_key_value_heads: Whole = 8
    head_dim: HeadDim = 64
    max_position_embeddings: Whole = 131072
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: Factor = 150000.0
    attention_bias: bool = True
    sliding_window: Whole | None = 128
    num_local_experts: Experts = 128
    num_experts_per_tok: Whole = 4
    swiglu_alpha: Factor = 1.702
    swiglu_limit: Factor = 7.0

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        if fields.get("rope_scaling") is None and fields.get("rope_parameters") is None:
            fields["rope_scaling"] = _YARN
        return super().prepare(fields, where)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        original = getattr(self.rope_scaling, "original_max_position_embeddings", None)
        for name, meant in (
            ("experts_per_token", self.num_experts_per_tok),
            ("initial_context_length", original),
        ):
            value = raw.get(name, meant)
            self.require(meant in (None, value), where, name, f"{meant}, as stated elsewhere", value)

    def to_hf(self) -> dict[str, Any]:
        config = super().to_hf()  # without a rotation transformers would take its default
        return {**config, "rope_scaling": config["rope_scaling"] or {"rope_type": "default"}}


def clamped_mixture(cfg: GptOssConfig, state: ParallelState) -> MoE:
    """Make the experts of a block, and the router with biases before them."""
    sizes = cfg.num_local_experts, cfg.hidden_size, cfg.intermediate_size
    alpha, limit, starts = cfg.swiglu_alpha, cfg.swiglu_limit, cfg.initial
    experts = ClampedExperts(*sizes, alpha=alpha, limit=limit, initial=starts, state=state)
    return MoE(router(cfg, state, biased=True), experts, state=state)


class GptOssBlock(LlamaBlock):
    """Compute a block of GPT-OSS (OpenAI 2025).

    x = x + attention(attention_norm(x))    * a sink for each head; every other block: a window
    x = x + mlp(mlp_norm(x))                * experts with biases, clamped
    """

    make_experts = staticmethod(clamped_mixture)

    def __init__(self, cfg: GptOssConfig, number: int, state: ParallelState) -> None:
        super().__init__(cfg, number, state, sinks=True)


GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", GptOssConfig, decoder(GptOssBlock), NAMES)
