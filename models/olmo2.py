"""OLMo 2: norms after each branch, and over all queries and all keys of a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import nn

from ..layers import Attention, HeadsRMSNorm
from .base.blocks import Block, PostNormBlock
from .base.family import Family
from .base.hugging_face_names import in_blocks
from .llama import ATTENTION, EMBEDDING, ENDS, GATED_MLP, Llama, LlamaConfig, grouped_attention
from .qwen import HEAD_NORMS, QK_NORM_NAMES

NAMES = (
    *EMBEDDING,
    *ATTENTION,
    *QK_NORM_NAMES,
    *GATED_MLP,
    *in_blocks(("after_attention", "post_attention_layernorm"), ("after_mlp", "post_feedforward_layernorm")),
    *ENDS,
)


class Olmo2Config(LlamaConfig):
    """List the fields of an OLMo 2 config.json that the model computes with."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LlamaConfig.HARMLESS,
        **dict.fromkeys(HEAD_NORMS, (True,)),
        "mlp_bias": (False,),
        "clip_qkv": (),
    }

    rms_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)


class Olmo2(Llama):
    """Compute OLMo 2, or the stage that this pipeline rank holds."""

    config: Olmo2Config

    def block(self, number: int) -> Block:
        return PostNormBlock(self.attention(number), self.feed_forward(number), norm=self.make_norm)

    def attention(self, number: int) -> Attention:
        bias = self.config.attention_bias
        return grouped_attention(self.config, self.state, qkv_bias=bias, out_bias=bias, qk_norm=self.qk_norm)

    def qk_norm(self, heads: int) -> nn.Module:
        return HeadsRMSNorm(heads, self.config.head_dim, self.config.rms_norm_eps, state=self.state)


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", Olmo2Config, Olmo2, NAMES)
