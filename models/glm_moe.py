"""GLM-4.5: Llama with experts behind a first few blocks, sigmoid scores and biases that balance them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.config import without
from .base.family import Family
from .base.parts import attention, gated_mlp, head_rms_norm, rms_norm
from .expert_block import NarrowExpertsConfig
from .grouped_experts import GROUPED_EXPERTS, corrected_router, grouped_experts
from .llama import NAMES, RotaryDecoder
from .multi_token import MultiTokenConfig
from .partial_rotary import PartialRotaryConfig


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


class Glm4MoeBlock(nn.Module):
    """Compute a block of GLM-4.5 (Zeng et al. 2025).

    x = x + attention(attention_norm(x))    * biases on q, k, v; heads partly rotated, some normalised
    x = x + mlp(mlp_norm(x))                * after the first blocks: experts and a net for all tokens
    """

    def __init__(self, cfg: Glm4MoeConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        norms = head_rms_norm(cfg, state) if cfg.use_qk_norm else None
        self.attention_norm = rms_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=cfg.attention_bias, qk_norm=norms)
        self.mlp_norm = rms_norm(cfg, state)
        if cfg.has_experts(number):
            self.mlp: nn.Module = grouped_experts(cfg, corrected_router(cfg, state), state)
        else:
            self.mlp = gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class Glm4Moe(RotaryDecoder):
    """Compute GLM-4.5, or the stage that this pipeline rank holds."""

    config: Glm4MoeConfig
    Block = Glm4MoeBlock


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    Glm4MoeConfig,
    Glm4Moe,
    NAMES.but(GROUPED_EXPERTS),
    further="model.layers.{i}.",
)
