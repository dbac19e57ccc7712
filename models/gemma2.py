"""Gemma 2: a norm before and after each branch, bounded scores and logits, a window in every other block."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import Attention, RMSNorm
from .base.blocks import Block, SandwichBlock
from .base.config import names
from .base.family import Family
from .base.hugging_face_names import in_blocks
from .layer_types import LayerTypesConfig
from .llama import ATTENTION, EMBEDDING, ENDS, GATED_MLP, Llama, LlamaConfig, grouped_attention

NAMES = (
    *EMBEDDING,
    *ATTENTION,
    *GATED_MLP,
    *in_blocks(
        ("attention_norm", "input_layernorm"),
        ("after_attention", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("after_mlp", "post_feedforward_layernorm"),
    ),
    *ENDS,
)


class Gemma2Config(LayerTypesConfig):
    """List the fields of a Gemma 2 config.json that the model computes with, and transformers' defaults."""

    OWN_NAMES: ClassVar[Mapping[str, str]] = {"hidden_activation": "hidden_act"}
    NOT_KEYS: ClassVar[frozenset[str]] = names("hidden_act")
    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LlamaConfig.HARMLESS,
        **dict.fromkeys(("mlp_bias", "use_bidirectional_attention"), (False,)),
    }

    vocab_size: int = Field(default=256000, gt=0, le=2**24)
    head_dim: int = Field(default=256, gt=0, le=2**16, multiple_of=2)
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = Field(default=8192, gt=0)
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: int = Field(default=256, gt=0)
    attn_logit_softcapping: float | None = Field(default=50.0, gt=0)
    final_logit_softcapping: float | None = Field(default=30.0, gt=0)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        fields = super().read({"head_dim": 256, "num_key_value_heads": 4, **raw}, where)
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if key in raw:  # null says: none
                fields[key] = raw[key]
        return fields

    def to_hf(self) -> dict[str, Any]:
        return {self.spelled(key): value for key, value in super().to_hf().items()}


class Gemma2(Llama):
    """Compute Gemma 2, or the stage that this pipeline rank holds."""

    config: Gemma2Config

    def block(self, number: int) -> Block:
        return SandwichBlock(self.attention(number), self.feed_forward(number), norm=self.make_norm)

    def attention(self, number: int) -> Attention:
        cfg = self.config
        return grouped_attention(
            cfg,
            self.state,
            qkv_bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            window=cfg.window(number),
            scale=cfg.query_pre_attn_scalar**-0.5,
            soft_cap=cfg.attn_logit_softcapping,
        )

    def make_norm(self) -> nn.Module:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, offset=1.0, state=self.state)

    def enter(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        return x_BSD * x_BSD.new_full((), sqrt(self.config.hidden_size))  # rounded to its dtype

    @property
    def logit_cap(self) -> float | None:
        return self.config.final_logit_softcapping


GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", Gemma2Config, Gemma2, NAMES)
