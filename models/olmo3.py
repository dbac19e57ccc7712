"""OLMo 3: OLMo 2 with a window in three of four blocks; the others alone stretch their positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from ..layers import Attention, RotaryEmbedding
from .base.family import Family
from .layer_ropes import LayerRopesConfig
from .llama import grouped_attention
from .olmo2 import NAMES, Olmo2, Olmo2Config


class Olmo3Config(Olmo2Config, LayerRopesConfig):
    """List the fields of an OLMo 3 config.json that the model computes with."""

    PATTERN: ClassVar[int] = 4

    rope_theta: float = Field(default=500000.0, gt=0)


class Olmo3(Olmo2):
    """Compute OLMo 3, or the stage that this pipeline rank holds."""

    config: Olmo3Config

    def attention(self, number: int) -> Attention:
        cfg = self.config
        return grouped_attention(
            cfg,
            self.state,
            qkv_bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            qk_norm=self.qk_norm,
            rotary=cfg.kind(number),
            window=cfg.window(number),
        )

    def make_rotary(self) -> Mapping[str, RotaryEmbedding]:
        return self.config.rotations()


OLMO3 = Family("olmo3", "Olmo3ForCausalLM", Olmo3Config, Olmo3, NAMES)
