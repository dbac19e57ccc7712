"""DeepSeek-V3: DeepSeek-V2 with sigmoid scores of experts and biases that balance them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..layers import TopKRouter
from .base.family import Family
from .deepseek_v2 import NAMES, DeepseekV2, LatentAttentionConfig
from .grouped_experts import corrected_router
from .multi_token import MultiTokenConfig


class DeepseekV3Config(LatentAttentionConfig, MultiTokenConfig):
    """List the fields of a DeepSeek-V3 config.json that the model computes with.

    ``rope_interleave``: the numbers of a rotated pair are neighbours.
    """

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LatentAttentionConfig.HARMLESS,
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }
    OWN_NAMES: ClassVar[Mapping[str, str]] = {
        **MultiTokenConfig.OWN_NAMES,
        **LatentAttentionConfig.OWN_NAMES,
    }

    num_local_experts: int = Field(default=256, gt=0, le=2**12)
    num_experts_per_tok: int = Field(default=8, gt=0)
    moe_intermediate_size: int = Field(default=2048, gt=0, le=2**22)
    n_group: int | None = Field(default=8, gt=0)
    topk_group: int | None = Field(default=4, gt=0)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = Field(default=2.5, gt=0, le=1e3)
    first_k_dense_replace: int = Field(default=3, ge=0)
    rope_interleave: bool = True
    max_position_embeddings: int = Field(default=4096, gt=0)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().read({"num_key_value_heads": 128, **raw}, where)


class DeepseekV3(DeepseekV2):
    """Compute DeepSeek-V3, or the stage that this pipeline rank holds."""

    config: DeepseekV3Config

    @property
    def interleaved(self) -> bool:
        return self.config.rope_interleave

    def router(self) -> TopKRouter:
        return corrected_router(self.config, self.state)


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    DeepseekV3Config,
    DeepseekV3,
    NAMES,
    further="model.layers.{i}.",
)
