"""Phi 1, 1.5 and 2: GPT-NeoX with one norm for both branches, and a bias in the output layer too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import nn

from ..layers import Attention, Dropout, LayerNorm
from .base.blocks import Block, ParallelBlock
from .base.config import without
from .base.family import Family
from .base.hugging_face_names import BOTH, Rename, Rule, in_blocks
from .gpt_neox import GPTNeoX, GPTNeoXConfig
from .llama import EMBEDDING, grouped_attention

NAMES: tuple[Rule, ...] = (
    *EMBEDDING,
    *in_blocks(
        ("attention.qkv.q", "self_attn.q_proj"),
        ("attention.qkv.k", "self_attn.k_proj"),
        ("attention.qkv.v", "self_attn.v_proj"),
        ("attention.out", "self_attn.dense"),
        ("attention.q_norm", "self_attn.q_layernorm"),
        ("attention.k_norm", "self_attn.k_layernorm"),
        ("mlp.up", "mlp.fc1"),
        ("mlp.down", "mlp.fc2"),
        ("attention_norm", "input_layernorm"),
        kinds=BOTH,
    ),
    *(Rename(f"norm.{kind}", f"model.final_layernorm.{kind}") for kind in BOTH),
    *(Rename(f"head.{kind}", f"lm_head.{kind}") for kind in BOTH),
)


class PhiConfig(GPTNeoXConfig):
    """List the fields of a Phi config.json that the model computes with."""

    OWN_NAMES: ClassVar[Mapping[str, str]] = {}
    NOT_KEYS: ClassVar[frozenset[str]] = frozenset()
    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **without(GPTNeoXConfig.HARMLESS, "qk_layernorm", "num_key_value_heads"),
        **dict.fromkeys(("attention_bias", "use_parallel_residual"), (True,)),
        **{"hidden_dropout": (0, 0.0), "tie_word_embeddings": (False,)},
    }

    hidden_act: str = "gelu_new"
    partial_rotary_factor: float = Field(default=0.5, gt=0, le=1)
    qk_layernorm: bool = False
    resid_pdrop: float = Field(default=0.0, ge=0, lt=1)
    embd_pdrop: float = Field(default=0.0, ge=0, lt=1)


class Phi(GPTNeoX):
    """Compute Phi, or the stage that this pipeline rank holds. Source: Gunasekar et al. 2023."""

    config: PhiConfig
    biased_head = True

    def block(self, number: int) -> Block:
        attention, mlp, dropout = self.attention(number), self.feed_forward(number), self.config.resid_pdrop
        return ParallelBlock(attention, mlp, norm=self.make_norm, dropout=dropout, state=self.state)

    def attention(self, number: int) -> Attention:
        norm = self.qk_norm if self.config.qk_layernorm else None
        return grouped_attention(self.config, self.state, qkv_bias=True, out_bias=True, qk_norm=norm)

    def qk_norm(self, heads: int) -> nn.Module:
        return LayerNorm(self.config.head_dim, self.config.layer_norm_eps, heads=True, state=self.state)

    def add_entry(self) -> None:
        self.dropout = Dropout(self.config.embd_pdrop, state=self.state)


PHI = Family("phi", "PhiForCausalLM", PhiConfig, Phi, NAMES)
