"""GLM-4 (0414): norms before and after each branch, half of each head rotated, gate and up stored as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..layers import Attention, RotaryEmbedding
from .base.blocks import Block, SandwichBlock
from .base.family import Family
from .base.hugging_face_names import Rule, in_blocks
from .llama import ATTENTION, EMBEDDING, ENDS, Llama, grouped_attention
from .partial_rotary import PartialRotaryConfig
from .phi3 import FUSED_GATE_UP

NAMES: tuple[Rule, ...] = (
    *EMBEDDING,
    *ATTENTION,
    *FUSED_GATE_UP,
    *in_blocks(
        ("mlp.down", "mlp.down_proj"),
        ("attention_norm", "input_layernorm"),
        ("after_attention", "post_self_attn_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        ("after_mlp", "post_mlp_layernorm"),
    ),
    *ENDS,
)


class Glm4Config(PartialRotaryConfig):
    """List the fields of a GLM-4 config.json that the model computes with, and transformers' defaults.

    ``attention_bias``: on queries, keys and values.
    """

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **PartialRotaryConfig.HARMLESS,
        "mlp_bias": (False,),
    }

    head_dim: int = Field(default=128, gt=0, le=2**16, multiple_of=2)
    max_position_embeddings: int = Field(default=131072, gt=0)
    rms_norm_eps: float = Field(default=1.5625e-7, gt=0, lt=0.1)
    attention_bias: bool = True
    partial_rotary_factor: float = Field(default=0.5, gt=0, le=1)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().read({"num_key_value_heads": 2, "head_dim": 128, **raw}, where)

    def to_hf(self) -> dict[str, Any]:
        # By default transformers pads with a token that other vocabularies do not have.
        return {**super().to_hf(), "pad_token_id": None}


class Glm4(Llama):
    """Compute GLM-4, or the stage that this pipeline rank holds."""

    config: Glm4Config

    def block(self, number: int) -> Block:
        return SandwichBlock(self.attention(number), self.feed_forward(number), norm=self.make_norm)

    def attention(self, number: int) -> Attention:
        return grouped_attention(self.config, self.state, qkv_bias=self.config.attention_bias)

    def make_rotary(self) -> Mapping[str, RotaryEmbedding]:
        cfg = self.config
        scaling = cfg.rope_scaling.model_dump() if cfg.rope_scaling else None
        return {"all": RotaryEmbedding(cfg.rotary_dim, cfg.rope_theta, scaling, interleaved=True)}


GLM4 = Family("glm4", "Glm4ForCausalLM", Glm4Config, Glm4, NAMES)
