"""Seed-OSS: Llama with biases on queries, keys and values, and dropout of what each branch adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ..layers import Attention
from .base.family import Family
from .llama import NAMES, Llama, LlamaConfig, grouped_attention


class SeedOssConfig(LlamaConfig):
    """List the fields of a Seed-OSS config.json that the model computes with, and transformers' defaults.

    ``attention_bias``: on queries, keys and values; ``attention_out_bias``: on the product after attention.
    """

    head_dim: int = Field(default=128, gt=0, le=2**16, multiple_of=2)
    max_position_embeddings: int = Field(default=524288, gt=0)
    attention_bias: bool = True
    attention_out_bias: bool = False
    attention_dropout: float = Field(default=0.1, ge=0, lt=1)
    residual_dropout: float = Field(default=0.1, ge=0, lt=1)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().read({"num_key_value_heads": 8, "head_dim": 128, **raw}, where)

    def to_hf(self) -> dict[str, Any]:
        # By default transformers ends at and pads with tokens that other vocabularies use.
        return {**super().to_hf(), "pad_token_id": None}


class SeedOss(Llama):
    """Compute Seed-OSS, or the stage that this pipeline rank holds."""

    config: SeedOssConfig

    @property
    def branch_dropout(self) -> float:
        return self.config.residual_dropout

    def attention(self, number: int) -> Attention:
        cfg = self.config
        return grouped_attention(
            cfg, self.state, qkv_bias=cfg.attention_bias, out_bias=cfg.attention_out_bias
        )


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", SeedOssConfig, SeedOss, NAMES)
