"""Gemma 2: a norm before and after each branch, bounded scores and logits, a window in every other block."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.fields import NO, Count, Factor, Fixed, HeadDim, Whole, key
from .base.parts import AttentionOptions, attention, gated_mlp
from .gemma import GemmaDecoder, gemma_norm
from .layer_types import LayerTypesConfig
from .llama import NAMES as LLAMA_NAMES

NAMES = LLAMA_NAMES.but(
    {
        "after_attention": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }
)


class Gemma2Config(LayerTypesConfig):
    """List the fields of a Gemma 2 config.json."""

    FIXED: ClassVar[Fixed] = dict.fromkeys(("mlp_bias", "use_bidirectional_attention"), NO)

    vocab_size: Count = 256000
    num_key_value_heads: Whole = 4
    head_dim: HeadDim = 256
    hidden_act: str = key("hidden_activation", default="gelu_pytorch_tanh")
    max_position_embeddings: Whole = 8192
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: Whole = 256
    attn_logit_softcapping: Factor | None = 50.0
    final_logit_softcapping: Factor | None = 30.0


class Gemma2Block(nn.Module):
    """Compute a block of Gemma 2 (Gemma Team 2024).

    x = x + after_attention(attention(attention_norm(x)))    * norms behind branches too; a window in 1 of 2
    x = x + after_mlp(mlp(mlp_norm(x)))                      * GELU; norms scale by 1 + weight
    """

    def __init__(self, cfg: Gemma2Config, number: int, state: ParallelState) -> None:
        super().__init__()
        bias, scale, cap = cfg.attention_bias, cfg.query_pre_attn_scalar**-0.5, cfg.attn_logit_softcapping
        options = AttentionOptions(window=cfg.window(number), scale=scale, soft_cap=cap)
        self.attention_norm = gemma_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=bias, out_bias=bias, **options)
        self.after_attention, self.mlp_norm = gemma_norm(cfg, state), gemma_norm(cfg, state)
        self.mlp, self.after_mlp = gated_mlp(cfg, state), gemma_norm(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.after_attention(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.after_mlp(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


class Gemma2(GemmaDecoder):
    """Compute Gemma 2, or the stage that this pipeline rank holds: logits are bounded."""

    config: Gemma2Config
    Block: ClassVar[Any] = Gemma2Block

    @property
    def logit_cap(self) -> float | None:
        return self.config.final_logit_softcapping


GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", Gemma2Config, Gemma2, NAMES)
