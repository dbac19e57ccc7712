"""Cohere's Command R: parallel branches, norms without bias, rotated pairs of neighbours, scaled logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import nn

from ..layers import Attention, HeadsLayerNorm, LayerNorm, RotaryEmbedding
from .base.blocks import Block, ParallelBlock
from .base.config import without
from .base.family import Family
from .base.hugging_face_names import in_blocks
from .llama import ATTENTION, EMBEDDING, ENDS, GATED_MLP, Llama, LlamaConfig, grouped_attention
from .qwen import QK_NORM_NAMES

NAMES = (
    *EMBEDDING,
    *ATTENTION,
    *QK_NORM_NAMES,
    *GATED_MLP,
    *in_blocks(("attention_norm", "input_layernorm")),
    *ENDS,
)


class CohereConfig(LlamaConfig):
    """List the fields of a Command R config.json that the model computes with."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **without(LlamaConfig.HARMLESS, "logit_scale", "use_qk_norm"),
        "rms_norm_eps": (),  # layer_norm_eps says it
        "mlp_bias": (False,),
    }

    vocab_size: int = Field(default=256000, gt=0, le=2**24)
    max_position_embeddings: int = Field(default=8192, gt=0)
    layer_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)
    rope_theta: float = Field(default=500000.0, gt=0)
    tie_word_embeddings: bool = True
    logit_scale: float = Field(default=0.0625, gt=0)
    use_qk_norm: bool = False


class Cohere(Llama):
    """Compute Command R, or the stage that this pipeline rank holds."""

    config: CohereConfig

    def block(self, number: int) -> Block:
        return ParallelBlock(self.attention(number), self.feed_forward(number), norm=self.make_norm)

    def attention(self, number: int) -> Attention:
        cfg = self.config
        bias, norm = cfg.attention_bias, self.qk_norm if cfg.use_qk_norm else None
        return grouped_attention(cfg, self.state, qkv_bias=bias, out_bias=bias, qk_norm=norm)

    def qk_norm(self, heads: int) -> nn.Module:
        return HeadsLayerNorm(heads, self.config.head_dim, self.config.layer_norm_eps, state=self.state)

    def make_norm(self) -> nn.Module:
        cfg = self.config
        return LayerNorm(cfg.hidden_size, cfg.layer_norm_eps, bias=False, state=self.state)

    def make_rotary(self) -> Mapping[str, RotaryEmbedding]:
        cfg = self.config
        scaling = cfg.rope_scaling.model_dump() if cfg.rope_scaling else None
        return {"all": RotaryEmbedding(cfg.rotary_dim, cfg.rope_theta, scaling, interleaved=True)}

    @property
    def logit_scale(self) -> float:
        return self.config.logit_scale


COHERE = Family("cohere", "CohereForCausalLM", CohereConfig, Cohere, NAMES)
