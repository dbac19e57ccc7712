"""StableLM: Llama with LayerNorm and partly rotated heads; some normalise heads or have parallel branches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import nn

from ..layers import Attention, HeadsLayerNorm, LayerNorm
from .base.blocks import Block, ParallelBlock, PreNormBlock
from .base.config import without
from .base.family import Family
from .base.hugging_face_names import BOTH, Rename, Rule, Stack, in_blocks
from .llama import ATTENTION, EMBEDDING, GATED_MLP, Llama, grouped_attention
from .partial_rotary import PartialRotaryConfig

NAMES: tuple[Rule, ...] = (
    *EMBEDDING,
    *ATTENTION,
    *(
        Stack(
            f"layers.{{i}}.attention.{one}_norm.weight",
            f"model.layers.{{i}}.self_attn.{one}_layernorm.norms.{{e}}.weight",
        )
        for one in ("q", "k")
    ),
    *GATED_MLP,
    *in_blocks(("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm"), kinds=BOTH),
    *(Rename(f"norm.{kind}", f"model.norm.{kind}") for kind in BOTH),
    Rename("head.weight", "lm_head.weight"),
)


class StableLmConfig(PartialRotaryConfig):
    """List the fields of a StableLM config.json that the model computes with."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **without(PartialRotaryConfig.HARMLESS, "qk_layernorm"),
        **dict.fromkeys(("attention_bias", "rms_norm_eps"), ()),  # use_qkv_bias and layer_norm_eps say it
        "mlp_bias": (False,),
    }

    max_position_embeddings: int = Field(default=4096, gt=0)
    layer_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)

    def check(self, where: str) -> None:
        super().check(where)
        self.check_heads_fill(where)


class StableLm(Llama):
    """Compute StableLM, or the stage that this pipeline rank holds."""

    config: StableLmConfig

    def block(self, number: int) -> Block:
        attention, mlp = self.attention(number), self.feed_forward(number)
        if self.config.use_parallel_residual:
            return ParallelBlock(attention, mlp, norm=self.make_norm)
        return PreNormBlock(attention, mlp, norm=self.make_norm)

    def attention(self, number: int) -> Attention:
        cfg = self.config
        norm = self.qk_norm if cfg.qk_layernorm else None
        return grouped_attention(cfg, self.state, qkv_bias=cfg.use_qkv_bias, qk_norm=norm)

    def qk_norm(self, heads: int) -> nn.Module:
        return HeadsLayerNorm(heads, self.config.head_dim, self.config.layer_norm_eps, state=self.state)

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, self.config.layer_norm_eps, state=self.state)


STABLELM = Family("stablelm", "StableLmForCausalLM", StableLmConfig, StableLm, NAMES)
