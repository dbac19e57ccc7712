"""Gemma: Llama with embeddings that are scaled, norms whose weights count from 1, and a gated GELU."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import RMSNorm
from .base.family import Family
from .llama import NAMES, Llama, LlamaConfig


class GemmaConfig(LlamaConfig):
    """List the fields of a Gemma config.json that the model computes with, and transformers' defaults."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LlamaConfig.HARMLESS,
        **dict.fromkeys(("mlp_bias", "use_bidirectional_attention"), (False,)),
        "hidden_activation": ("gelu_pytorch_tanh",),
    }

    vocab_size: int = Field(default=256000, gt=0, le=2**24)
    head_dim: int = Field(default=256, gt=0, le=2**16, multiple_of=2)
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = Field(default=8192, gt=0)
    tie_word_embeddings: bool = True

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        if raw.get("hidden_act") == "gelu":  # so the first releases say, and mean the approximation
            raw = {**raw, "hidden_act": "gelu_pytorch_tanh"}
        return super().read({"head_dim": 256, "num_key_value_heads": 16, **raw}, where)


class Gemma(Llama):
    """Compute Gemma, or the stage that this pipeline rank holds."""

    config: GemmaConfig

    def make_norm(self) -> nn.Module:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, offset=1.0, state=self.state)

    def enter(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        return x_BSD * x_BSD.new_full((), sqrt(self.config.hidden_size))  # rounded to its dtype


GEMMA = Family("gemma", "GemmaForCausalLM", GemmaConfig, Gemma, NAMES)
