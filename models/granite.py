"""Granite 3: Llama with four factors: of embeddings, attention scores, what branches add, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from ..layers import Attention
from .base.blocks import Block, PreNormBlock
from .base.config import without
from .base.family import Family
from .llama import NAMES, Llama, LlamaConfig, grouped_attention

_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


class GraniteConfig(LlamaConfig):
    """List the fields of a Granite config.json that the model computes with."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = without(LlamaConfig.HARMLESS, *_FACTORS)

    vocab_size: int = Field(default=32000, gt=0, le=2**24)
    embedding_multiplier: float = Field(default=1.0, gt=0)
    attention_multiplier: float = Field(default=1.0, gt=0)
    residual_multiplier: float = Field(default=1.0, gt=0)
    logits_scaling: float = Field(default=1.0, gt=0)


class Granite(Llama):
    """Compute Granite 3, or the stage that this pipeline rank holds."""

    config: GraniteConfig

    def block(self, number: int) -> Block:
        scale = self.config.residual_multiplier
        return PreNormBlock(
            self.attention(number), self.feed_forward(number), norm=self.make_norm, scale=scale
        )

    def attention(self, number: int) -> Attention:
        cfg = self.config
        bias, scale = cfg.attention_bias, cfg.attention_multiplier
        return grouped_attention(cfg, self.state, qkv_bias=bias, out_bias=bias, scale=scale)

    def enter(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        return x_BSD * self.config.embedding_multiplier

    @property
    def logit_scale(self) -> float:
        return 1 / self.config.logits_scaling


GRANITE = Family("granite", "GraniteForCausalLM", GraniteConfig, Granite, NAMES)
