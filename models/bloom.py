"""Bloom: scores biased by distance in place of positions, a norm after the embedding, qkv by heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import Alibi, AttentionInputs, Dropout, alibi_slopes
from ..parallel_state import BadInput, ParallelState
from .base.causal_lm import CausalLM
from .base.config import ModelConfig, names
from .base.family import Family
from .base.names import Names, fused
from .base.parts import attention, layer_norm, mlp

NAMES = Names(
    "transformer.h.{i}",
    {"embed": "transformer.word_embeddings", "embed_norm": "transformer.word_embeddings_layernorm"},
    {
        "attention_norm": "input_layernorm",
        "attention.qkv": fused("self_attention.query_key_value", "q k v", groups="num_attention_heads"),
        "attention.out": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    {"norm": "transformer.ln_f", "head": "lm_head"},
)


class BloomConfig(ModelConfig):
    """List the fields of a Bloom config.json that the model computes with, under transformers' common names.

    ``max_position_embeddings``: the length of its training, which Bloom's files call ``seq_length``; the
    weights do not depend on it.
    """

    OWN_NAMES: ClassVar[Mapping[str, str]] = {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "layer_norm_epsilon": "layer_norm_eps",
        "seq_length": "max_position_embeddings",
    }
    NOT_KEYS: ClassVar[frozenset[str]] = names("layer_norm_eps")
    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "apply_residual_connection_post_layernorm": (False,),
        "slow_but_exact": (False, True),  # the same numbers, summed in another order
        "intermediate_size": (),  # 4 * hidden_size
        "n_inner": (),
        **dict.fromkeys(("skip_bias_add", "skip_bias_add_qkv", "bias_dropout_fusion"), (False, True)),
        **dict.fromkeys(("masked_softmax_fusion", "attention_softmax_in_fp32"), (False, True)),
    }

    vocab_size: int = Field(gt=0, le=2**24)
    hidden_size: int = Field(gt=0, le=2**20)
    intermediate_size: int = Field(gt=0, le=2**22)
    num_hidden_layers: int = Field(gt=0, le=2**12)
    num_attention_heads: int = Field(gt=0, le=2**16)
    max_position_embeddings: int = Field(default=2048, gt=0)
    initializer_range: float = Field(default=0.02, ge=0, le=10)
    layer_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)
    tie_word_embeddings: bool = True
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        hidden, other = raw.get("hidden_size"), raw.get("n_embed")
        if hidden is not None and other is not None and hidden != other:
            raise BadInput(where, "n_embed", expected=f"{hidden!r}, as hidden_size", found=repr(other))
        hidden = other if hidden is None else hidden
        fields = super().read({**raw, "hidden_size": hidden}, where)
        return {**fields, "intermediate_size": 4 * hidden} if isinstance(hidden, int) else fields

    @classmethod
    def read_keys(cls) -> set[str]:
        return {"n_embed", "offset_alibi"}

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def hidden_act(self) -> str:
        return "gelu_new"

    def check(self, where: str) -> None:
        if self.hidden_size % self.num_attention_heads:
            expected = f"a multiple of n_head={self.num_attention_heads}"
            raise BadInput(where, "hidden_size", expected=expected, found=self.hidden_size)

    def to_hf(self) -> dict[str, Any]:
        return {self.spelled(key): value for key, value in super().to_hf().items()}


class BloomBlock(nn.Module):
    """Compute a block of Bloom. Source: Scao et al. 2022.

    x = x + dropout(attention(attention_norm(x)))    * scores biased by distance; biases, LayerNorm
    x = x + dropout(mlp(mlp_norm(x)))                * no gate; GELU
    """

    def __init__(self, cfg: BloomConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        alibi = Alibi(alibi_slopes(cfg.num_attention_heads))
        self.attention_norm = layer_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=True, out_bias=True, rotary=None, alibi=alibi)
        self.mlp_norm, self.mlp = layer_norm(cfg, state), mlp(cfg, state)
        self.dropout = Dropout(cfg.hidden_dropout, state=state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


class Bloom(CausalLM):
    """Compute Bloom, or the stage that this pipeline rank holds: a norm after the embedding."""

    config: BloomConfig
    Block = BloomBlock
    make_norm = staticmethod(layer_norm)

    def add_embedding_modules(self) -> None:
        self.embed_norm = layer_norm(self.config, self.state)

    def embed_hook(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        normalised: Tensor = self.embed_norm(x_BSD)
        return normalised


BLOOM = Family("bloom", "BloomForCausalLM", BloomConfig, Bloom, NAMES, optional_prefix="transformer.")
