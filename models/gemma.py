"""Gemma: Llama with embeddings that are scaled, norms whose weights count from 1, and a gated GELU."""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import Any, ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.fields import NO, Count, Fixed, HeadDim, Whole
from .base.parts import attention, gated_mlp, rms_norm
from .llama import NAMES, LlamaConfig, RotaryDecoder


class GemmaConfig(LlamaConfig):
    """List the fields of a Gemma config.json."""

    FIXED: ClassVar[Fixed] = {
        **dict.fromkeys(("mlp_bias", "use_bidirectional_attention"), NO),
        "hidden_activation": ("gelu_pytorch_tanh",),
    }

    vocab_size: Count = 256000
    num_key_value_heads: Whole = 16
    head_dim: HeadDim = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: Whole = 8192
    tie_word_embeddings: bool = True

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        if fields.get("hidden_act") == "gelu":  # so the first releases say, and mean the approximation
            fields["hidden_act"] = "gelu_pytorch_tanh"
        return super().prepare(fields, where)


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
