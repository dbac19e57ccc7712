"""GPT-OSS: experts that are biased and clamped, a sink for each head, a window in every other block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs, ClampedExperts, MoE
from ..parallel_state import BadInput, ParallelState
from .base.family import Family
from .base.parts import attention, initial, rms_norm, router
from .expert_block import ExpertsConfig
from .layer_types import LayerTypesConfig
from .llama import NAMES as LLAMA_NAMES
from .llama import LlamaConfig, RotaryDecoder

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
    """List the fields of a GPT-OSS config.json that the model computes with, and transformers' defaults."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LlamaConfig.HARMLESS,
        "hidden_act": ("silu",),  # the gate's sigmoid has a factor of its own
        "mlp_bias": (True,),
    }

    vocab_size: int = Field(default=201088, gt=0, le=2**24)
    head_dim: int = Field(default=64, gt=0, le=2**16, multiple_of=2)
    max_position_embeddings: int = Field(default=131072, gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)
    rope_theta: float = Field(default=150000.0, gt=0)
    attention_bias: bool = True
    sliding_window: int | None = Field(default=128, gt=0)
    num_local_experts: int = Field(default=128, gt=0, le=2**12)
    num_experts_per_tok: int = Field(default=4, gt=0)
    swiglu_alpha: float = Field(default=1.702, gt=0)
    swiglu_limit: float = Field(default=7.0, gt=0)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        if raw.get("rope_scaling") is None and raw.get("rope_parameters") is None:
            raw = {**raw, "rope_scaling": _YARN}
        return super().read({"num_key_value_heads": 8, "head_dim": 64, **raw}, where)

    @classmethod
    def read_keys(cls) -> set[str]:
        return {*super().read_keys(), "experts_per_token", "initial_context_length"}

    def check_stated(self, raw: Mapping[str, Any], where: str) -> None:
        super().check_stated(raw, where)
        original = getattr(self.rope_scaling, "original_max_position_embeddings", None)
        for key, meant in (
            ("experts_per_token", self.num_experts_per_tok),
            ("initial_context_length", original),
        ):
            if meant is not None and raw.get(key, meant) != meant:
                raise BadInput(where, key, expected=f"{meant}, as stated elsewhere", found=repr(raw[key]))

    def to_hf(self) -> dict[str, Any]:
        said = super().to_hf()  # without a rotation transformers would take its default
        return {**said, "rope_scaling": said["rope_scaling"] or {"rope_type": "default"}}


def clamped_mixture(cfg: GptOssConfig, state: ParallelState) -> MoE:
    """Make the experts of a block behind their router."""
    limits = {"alpha": cfg.swiglu_alpha, "limit": cfg.swiglu_limit}
    experts, width, inner = cfg.num_local_experts, cfg.hidden_size, cfg.intermediate_size
    stack = ClampedExperts(experts, width, inner, **limits, initial=initial(cfg), state=state)
    return MoE(router(cfg, state, biased=True), stack, state=state)


class GptOssBlock(nn.Module):
    """Compute a block of GPT-OSS (OpenAI 2025).

    x = x + attention(attention_norm(x))    * a sink for each head; every other block: a window
    x = x + mlp(mlp_norm(x))                * experts with biases, clamped
    """

    def __init__(self, cfg: GptOssConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        bias, window = cfg.attention_bias, cfg.window(number)
        self.attention_norm = rms_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=bias, out_bias=bias, window=window, sinks=True)
        self.mlp_norm, self.mlp = rms_norm(cfg, state), clamped_mixture(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class GptOss(RotaryDecoder):
    """Compute GPT-OSS, or the stage that this pipeline rank holds."""

    config: GptOssConfig
    Block = GptOssBlock


GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", GptOssConfig, GptOss, NAMES)
