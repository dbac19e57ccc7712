"""GPT-2.    B batch  S sequence  D hidden"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import (
    ACTIVATIONS,
    AttentionInputs,
    Dropout,
    PositionEmbedding,
    default_positions,
)
from ..parallel_state import BadInput, Normal, ParallelState
from .base.causal_lm import CausalLM
from .base.config import ModelConfig, names
from .base.family import Family
from .base.names import Names, fused, transposed
from .base.parts import AttentionOptions, attention, layer_norm, mlp


class GPT2Config(ModelConfig):
    """List the fields of a GPT-2 config.json that the model computes with, under transformers' common
    names.
    """

    OWN_NAMES: ClassVar[Mapping[str, str]] = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    NOT_KEYS: ClassVar[frozenset[str]] = names("intermediate_size hidden_act layer_norm_eps")
    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False, True),  # the same numbers, in fp32
    }

    vocab_size: int = Field(gt=0, le=2**24)
    hidden_size: int = Field(gt=0, le=2**20)
    intermediate_size: int = Field(gt=0, le=2**22)
    num_hidden_layers: int = Field(gt=0, le=2**12)
    num_attention_heads: int = Field(gt=0, le=2**16)
    max_position_embeddings: int = Field(gt=0, le=2**24)
    hidden_act: str = "gelu_new"
    initializer_range: float = Field(default=0.02, ge=0, le=10)
    layer_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)
    tie_word_embeddings: bool = True
    resid_pdrop: float = Field(default=0.1, ge=0, lt=1)
    embd_pdrop: float = Field(default=0.1, ge=0, lt=1)
    attn_pdrop: float = Field(default=0.1, ge=0, lt=1)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        fields = super().read(raw, where)
        if "hidden_size" in fields and isinstance(fields["hidden_size"], int):
            fields.setdefault("intermediate_size", 4 * fields["hidden_size"])
        return fields

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def check(self, where: str) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise BadInput(
                where,
                "n_embd",
                expected=f"a multiple of n_head={self.num_attention_heads}",
                found=self.hidden_size,
            )
        if self.hidden_act not in ACTIVATIONS:
            raise BadInput(
                where,
                "activation_function",
                expected=f"one of {', '.join(ACTIVATIONS)}",
                found=repr(self.hidden_act),
            )

    def to_hf(self) -> dict[str, Any]:
        return {self.spelled(key): value for key, value in self.model_dump().items()}


NAMES = Names(
    "transformer.h.{i}",
    {"embed": "transformer.wte", "position": "transformer.wpe"},
    {
        "attention_norm": "ln_1",
        "attention.qkv": fused("attn.c_attn", "q k v", transpose=True),
        "attention.out": transposed("attn.c_proj"),
        "mlp_norm": "ln_2",
        "mlp.up": transposed("mlp.c_fc"),
        "mlp.down": transposed("mlp.c_proj"),
    },
    {"norm": "transformer.ln_f", "head": "lm_head"},
)


class GPT2Block(nn.Module):
    """Compute a block of GPT-2. Source: Radford et al. 2019.

    x = x + dropout(attention(attention_norm(x)))    * biases, no rotation; LayerNorm
    x = x + dropout(mlp(mlp_norm(x)))                * no gate; GELU
    """

    def __init__(self, cfg: GPT2Config, number: int, state: ParallelState) -> None:
        super().__init__()
        # Layers that add to the residual stream start smaller, by their number (Radford et al. 2019, 2.3).
        small = Normal(cfg.initializer_range / sqrt(2 * cfg.num_hidden_layers))
        options = AttentionOptions(rotary=None, dropout=cfg.attn_pdrop, out_initial=small)
        self.attention_norm = layer_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=True, out_bias=True, **options)
        self.mlp_norm, self.mlp = layer_norm(cfg, state), mlp(cfg, state, out_initial=small)
        self.dropout = Dropout(cfg.resid_pdrop, state=state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


class GPT2(CausalLM):
    """Compute GPT-2, or the stage that this pipeline rank holds: learned positions, then dropout."""

    config: GPT2Config
    Block = GPT2Block
    make_norm = staticmethod(layer_norm)
    embedding_dropout = "embd_pdrop"

    def add_embedding_modules(self) -> None:
        rows, width = self.config.max_position_embeddings, self.config.hidden_size
        self.position = PositionEmbedding(rows, width, initial=self.initial, state=self.state)
        super().add_embedding_modules()

    def embed_hook(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            positions = default_positions(x_BSD, self.state, embedded=True)
        return super().embed_hook(self.position(x_BSD, positions), positions)


GPT2_FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    GPT2Config,
    GPT2,
    NAMES,
    ignorable=("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
    optional_prefix="transformer.",
)
