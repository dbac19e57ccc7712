"""Granite 3: Llama with four factors: of embeddings, attention scores, what branches add, and logits."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.fields import Count, Factor
from .base.parts import attention, gated_mlp, rms_norm
from .llama import NAMES, LlamaConfig, RotaryDecoder


class GraniteConfig(LlamaConfig):
    """List the fields of a Granite config.json."""

    vocab_size: Count = 32000
    embedding_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0


class GraniteBlock(nn.Module):
    """Compute a block of Granite 3.

    x = x + attention(attention_norm(x)) * scale    * scores and branches have factors
    x = x + mlp(mlp_norm(x)) * scale
    """

    def __init__(self, cfg: GraniteConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        bias, factor = cfg.attention_bias, cfg.attention_multiplier
        self.attention_norm = rms_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=bias, out_bias=bias, scale=factor)
        self.mlp_norm, self.mlp = rms_norm(cfg, state), gated_mlp(cfg, state, bias=cfg.mlp_bias)
        self.scale = cfg.residual_multiplier

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs) * self.scale
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD)) * self.scale
        return x_BSD


class Granite(RotaryDecoder):
    """Compute Granite 3, or the stage that this pipeline rank holds: embeddings and logits are scaled."""

    config: GraniteConfig
    Block: ClassVar[Any] = GraniteBlock

    def embed_hook(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        return x_BSD * self.config.embedding_multiplier

    @property
    def logit_scale(self) -> float:
        return 1 / self.config.logits_scaling


GRANITE = Family("granite", "GraniteForCausalLM", GraniteConfig, Granite, NAMES)
