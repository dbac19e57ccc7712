"""Cohere's Command R7B and A: Command R with a window in most blocks, whose heads alone are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from ..layers import Attention
from .base.family import Family
from .cohere import NAMES, Cohere, CohereConfig
from .layer_types import LayerTypesConfig
from .llama import grouped_attention


class Cohere2Config(CohereConfig, LayerTypesConfig):
    """List the fields of a Command R7B config.json that the model computes with."""

    PATTERN: ClassVar[int] = 4
    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **CohereConfig.HARMLESS,
        "use_qk_norm": (False,),
        "rotary_pct": (1, 1.0),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "use_parallel_embedding": (False,),
        "order_of_interleaved_layers": ("local_attn_first",),
    }

    rope_theta: float = Field(default=10000.0, gt=0)


class Cohere2(Cohere):
    """Compute Command R7B, or the stage that this pipeline rank holds."""

    config: Cohere2Config

    def attention(self, number: int) -> Attention:
        cfg = self.config
        bias, window = cfg.attention_bias, cfg.window(number)
        rotary = None if window is None else "all"
        return grouped_attention(cfg, self.state, qkv_bias=bias, out_bias=bias, rotary=rotary, window=window)


COHERE2 = Family("cohere2", "Cohere2ForCausalLM", Cohere2Config, Cohere2, NAMES)
