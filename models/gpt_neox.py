"""GPT-NeoX and Pythia: parallel branches with two norms, partly rotated heads, biases, qkv by heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import MLP, Attention, Dropout, LayerNorm
from .base.blocks import Block, ParallelBlock, PreNormBlock
from .base.config import names
from .base.family import Family
from .base.hugging_face_names import BOTH, Rename, Rule, fused_qkv
from .llama import Llama, grouped_attention
from .partial_rotary import PartialRotaryConfig

NAMES: tuple[Rule, ...] = (
    Rename("embed.weight", "gpt_neox.embed_in.weight"),
    *fused_qkv("gpt_neox.layers.{i}.attention.query_key_value", "num_attention_heads"),
    *(
        Rename(f"{ours}.{kind}", f"gpt_neox.{hf}.{kind}")
        for ours, hf in (
            ("layers.{i}.attention.out", "layers.{i}.attention.dense"),
            ("layers.{i}.mlp.up", "layers.{i}.mlp.dense_h_to_4h"),
            ("layers.{i}.mlp.down", "layers.{i}.mlp.dense_4h_to_h"),
            ("layers.{i}.attention_norm", "layers.{i}.input_layernorm"),
            ("layers.{i}.mlp_norm", "layers.{i}.post_attention_layernorm"),
            ("norm", "final_layer_norm"),
        )
        for kind in BOTH
    ),
    Rename("head.weight", "embed_out.weight"),
)


class GPTNeoXConfig(PartialRotaryConfig):
    """List the fields of a GPT-NeoX config.json that the model computes with."""

    OWN_NAMES: ClassVar[Mapping[str, str]] = {
        "rotary_pct": "partial_rotary_factor",
        "rotary_emb_base": "rope_theta",
    }
    NOT_KEYS: ClassVar[frozenset[str]] = names("partial_rotary_factor rope_theta")
    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **{key: one for key, one in PartialRotaryConfig.HARMLESS.items() if key != "rotary_pct"},
        **dict.fromkeys(("num_key_value_heads", "rms_norm_eps"), ()),  # each head has its own; layer_norm_eps
        "mlp_bias": (True,),
    }

    hidden_act: str = "gelu"
    layer_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    attention_bias: bool = True
    use_parallel_residual: bool = True
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().read({cls.OWN_NAMES.get(key, key): value for key, value in raw.items()}, where)

    def check(self, where: str) -> None:
        super().check(where)
        self.check_heads_fill(where)

    def to_hf(self) -> dict[str, Any]:
        return {self.spelled(key): value for key, value in super().to_hf().items()}


class GPTNeoX(Llama):
    """Compute GPT-NeoX, or the stage that this pipeline rank holds. Source: Black et al. 2022."""

    config: GPTNeoXConfig

    def block(self, number: int) -> Block:
        cfg, parts = self.config, (self.attention(number), self.feed_forward(number))
        dropout, norm = cfg.hidden_dropout, self.make_norm
        if cfg.use_parallel_residual:
            return ParallelBlock(*parts, norm=norm, two_norms=True, dropout=dropout, state=self.state)
        return PreNormBlock(*parts, norm=norm, dropout=dropout, state=self.state)

    def attention(self, number: int) -> Attention:
        bias = self.config.attention_bias
        return grouped_attention(self.config, self.state, qkv_bias=bias, out_bias=bias)

    def feed_forward(self, number: int) -> nn.Module:
        cfg = self.config
        return MLP(
            cfg.hidden_size, cfg.intermediate_size, act=cfg.hidden_act, initial=self.initial, state=self.state
        )

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, self.config.layer_norm_eps, state=self.state)

    def add_entry(self) -> None:
        self.dropout = Dropout(self.config.hidden_dropout, state=self.state)

    def enter(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        dropped: Tensor = self.dropout(x_BSD)
        return dropped


GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    GPTNeoXConfig,
    GPTNeoX,
    NAMES,
    ignorable=tuple(
        f"gpt_neox.layers.{{i}}.attention.{one}" for one in ("bias", "masked_bias", "rotary_emb.inv_freq")
    ),
    tied_head="embed_out.weight",
)
