"""Gemma: Llama with embeddings that are scaled, norms whose weights count from 1, and a gated GELU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import sqrt
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.parts import attention, gated_mlp, rms_norm
from .llama import NAMES, LlamaConfig, RotaryDecoder


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


gemma_norm = partial(rms_norm, offset=1.0)


class GemmaBlock(nn.Module):
    """Compute a block of Gemma (Gemma Team 2024).

    x = x + attention(attention_norm(x))    * norms scale by 1 + weight
    x = x + mlp(mlp_norm(x))                * GELU
    """

    def __init__(self, cfg: GemmaConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        bias = cfg.attention_bias
        self.attention_norm = gemma_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=bias, out_bias=bias)
        self.mlp_norm, self.mlp = gemma_norm(cfg, state), gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class GemmaDecoder(RotaryDecoder):
    """Scale embeddings by the root of their width, and norms by 1 + weight."""

    config: Any
    make_norm = staticmethod(gemma_norm)

    def embed_hook(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        return x_BSD * x_BSD.new_full((), sqrt(self.config.hidden_size))  # rounded to its dtype


class Gemma(GemmaDecoder):
    """Compute Gemma, or the stage that this pipeline rank holds."""

    Block = GemmaBlock


GEMMA = Family("gemma", "GemmaForCausalLM", GemmaConfig, Gemma, NAMES)
