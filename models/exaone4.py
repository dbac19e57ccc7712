"""EXAONE 4: norms after each branch and of each head; where blocks have windows, those alone are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..layers import Attention
from ..parallel_state import BadInput
from .base.blocks import Block, PostNormBlock
from .base.family import Family
from .layer_types import FULL, LayerTypesConfig
from .llama import Llama, LlamaConfig, grouped_attention
from .olmo2 import NAMES
from .qwen import HEAD_NORMS


class Exaone4Config(LayerTypesConfig):
    """List the fields of an EXAONE 4 config.json that the model computes with, and transformers' defaults."""

    PATTERN: ClassVar[int] = 4
    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LlamaConfig.HARMLESS,
        **dict.fromkeys(HEAD_NORMS, (True,)),
        **dict.fromkeys(("attention_bias", "mlp_bias"), (False,)),
    }

    rms_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        fields = super().read({"num_key_value_heads": 32, **raw}, where)
        pattern, blocks = raw.get("sliding_window_pattern"), fields.get("num_hidden_layers")
        if "layer_types" not in fields and isinstance(pattern, str):
            expected = "a list of the blocks' types beside a sliding_window_pattern of letters"
            raise BadInput(where, "layer_types", expected=expected, found=None)
        if (
            "layer_types" not in fields
            and fields.get("sliding_window", 1) is None
            and isinstance(blocks, int)
        ):
            fields["layer_types"] = (FULL,) * blocks
        return fields


class Exaone4(Llama):
    """Compute EXAONE 4, or the stage that this pipeline rank holds."""

    config: Exaone4Config

    def block(self, number: int) -> Block:
        return PostNormBlock(self.attention(number), self.feed_forward(number), norm=self.make_norm)

    def attention(self, number: int) -> Attention:
        cfg = self.config
        window = cfg.window(number)
        rotary = "all" if window or cfg.sliding_window is None else None
        return grouped_attention(cfg, self.state, head_norms=True, rotary=rotary, window=window)


EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", Exaone4Config, Exaone4, NAMES)
