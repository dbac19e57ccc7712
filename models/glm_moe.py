"""GLM-4.5: Llama with experts behind a first few blocks, sigmoid scores and biases that balance them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from ..layers import Attention
from .base.config import without
from .base.family import Family
from .expert_block import NarrowExpertsConfig
from .grouped_experts import GROUPED_EXPERT_NAMES, corrected_router, grouped_experts
from .llama import Llama, grouped_attention
from .multi_token import MultiTokenConfig
from .partial_rotary import PartialRotaryConfig
from .qwen import QWEN3


class Glm4MoeConfig(PartialRotaryConfig, MultiTokenConfig):
    """List the fields of a GLM-4.5 config.json that the model computes with."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        # It has a choice in these two.
        **without(NarrowExpertsConfig.HARMLESS, "use_qk_norm", "partial_rotary_factor"),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }
    OWN_NAMES: ClassVar[Mapping[str, str]] = MultiTokenConfig.OWN_NAMES

    num_local_experts: int = Field(default=128, gt=0, le=2**12)
    num_experts_per_tok: int = Field(default=8, gt=0)
    moe_intermediate_size: int = Field(default=1408, gt=0, le=2**22)
    norm_topk_prob: bool = True
    use_qk_norm: bool = False
    partial_rotary_factor: float = Field(default=0.5, gt=0, le=1)
    max_position_embeddings: int = Field(default=131072, gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().read({"num_key_value_heads": 8, **raw}, where)


class Glm4Moe(Llama):
    """Compute GLM-4.5, or the stage that this pipeline rank holds."""

    config: Glm4MoeConfig

    def attention(self, number: int) -> Attention:
        cfg = self.config
        return grouped_attention(cfg, self.state, qkv_bias=cfg.attention_bias, head_norms=cfg.use_qk_norm)

    def feed_forward(self, number: int) -> nn.Module:
        """One net in the first blocks; then experts, and beside them one more net for all tokens."""
        cfg = self.config
        if not cfg.has_experts(number):
            return super().feed_forward(number)
        return grouped_experts(cfg, corrected_router(cfg, self.state), self.state)


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    Glm4MoeConfig,
    Glm4Moe,
    (*QWEN3.rules, *GROUPED_EXPERT_NAMES),
    further="model.layers.{i}.",
)
