"""GPT-2.    B batch  S sequence  D hidden  E head dim  H heads here"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import (
    ACTIVATIONS,
    MLP,
    AttentionScope,
    ColumnParallelLinear,
    Dropout,
    KeyValueCache,
    LayerNorm,
    PositionEmbedding,
    RowParallelLinear,
    Stage,
    VocabParallelEmbedding,
    VocabParallelHead,
    causal_attention,
    default_positions,
    merge_heads,
    own_random,
    split_heads,
)
from ..parallel_state import BadInput, Normal, ParallelState
from .base.config import ModelConfig
from .base.family import CausalLM, Family
from .base.names import Rename, Rule, Split, Transpose


class GPT2Config(ModelConfig):
    """The fields of a GPT-2 config.json that the model computes with, under transformers' common names."""

    OWN_NAMES: ClassVar[Mapping[str, str]] = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    }
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


#: Ours -> Hugging Face's. Conv1D stores (in, out), and q, k, v in one.
NAMES: tuple[Rule, ...] = (
    Rename("embed.weight", "transformer.wte.weight"),
    Rename("position.weight", "transformer.wpe.weight"),
    *(
        Split(
            tuple(f"layers.{{i}}.attention.qkv.{one}.{kind}" for one in ("q", "k", "v")),
            f"transformer.h.{{i}}.attn.c_attn.{kind}",
            transpose=True,
        )
        for kind in ("weight", "bias")
    ),
    *(
        Transpose(f"layers.{{i}}.{ours}.{kind}", f"transformer.h.{{i}}.{hf}.{kind}")
        for ours, hf in (("attention.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj"))
        for kind in ("weight", "bias")
    ),
    *(
        Rename(f"{ours}.{kind}", f"transformer.{hf}.{kind}")
        for ours, hf in (
            ("layers.{i}.attention_norm", "h.{i}.ln_1"),
            ("layers.{i}.mlp_norm", "h.{i}.ln_2"),
            ("norm", "ln_f"),
        )
        for kind in ("weight", "bias")
    ),
    Rename("head.weight", "lm_head.weight"),
)


class Attention(nn.Module):
    """Multi-head attention. A rank holds whole heads: the cut never runs through one."""

    def __init__(self, cfg: GPT2Config, *, state: ParallelState | None = None) -> None:
        super().__init__()
        self.head_dim, self.dropout = cfg.head_dim, cfg.attn_pdrop
        self.state = state or ParallelState.alone()
        hidden = cfg.hidden_size
        self.qkv = ColumnParallelLinear(
            hidden,
            {"q": hidden, "k": hidden, "v": hidden},
            unit=cfg.head_dim,
            initial=Normal(cfg.initializer_range),
            state=state,
        )
        self.out = RowParallelLinear(
            hidden, hidden, unit=cfg.head_dim, initial=residual_initial(cfg), state=state
        )

    def forward(self, x_BSD: Tensor, scope: AttentionScope) -> Tensor:
        q_BHSE, k_BHSE, v_BHSE = (split_heads(t, self.head_dim) for t in self.qkv(x_BSD))
        k_BHSE, v_BHSE = scope.extend(self, k_BHSE, v_BHSE)
        dropout = self.dropout if self.training else 0.0
        with own_random(self.state, split=dropout > 0):
            heads_BHSE = causal_attention(q_BHSE, k_BHSE, v_BHSE, scope, dropout=dropout)
        out: Tensor = self.out(merge_heads(heads_BHSE))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream and added to it."""

    def __init__(self, cfg: GPT2Config, *, state: ParallelState | None = None) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(cfg.hidden_size, cfg.layer_norm_eps, state=state)
        self.attention = Attention(cfg, state=state)
        self.mlp_norm = LayerNorm(cfg.hidden_size, cfg.layer_norm_eps, state=state)
        self.mlp = MLP(
            cfg.hidden_size,
            cfg.intermediate_size,
            act=cfg.hidden_act,
            initial=Normal(cfg.initializer_range),
            out_initial=residual_initial(cfg),
            state=state,
        )
        self.dropout = Dropout(cfg.resid_pdrop, state=state)

    def forward(self, x_BSD: Tensor, scope: AttentionScope) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), scope))
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


class GPT2(CausalLM):
    """GPT-2, or this pipeline rank's stage of it."""

    def __init__(
        self, cfg: GPT2Config, *, split: Sequence[int] | None = None, state: ParallelState | None = None
    ) -> None:
        super().__init__()
        self.config, self.state = cfg, state or ParallelState.alone()
        self.stage = Stage.of(cfg.num_hidden_layers, split=split, state=state)
        init = Normal(cfg.initializer_range)
        if self.stage.first or (self.stage.last and cfg.tie_word_embeddings):
            ends = cfg.tie_word_embeddings and not (self.stage.first and self.stage.last)
            self.embed = VocabParallelEmbedding(
                cfg.vocab_size, cfg.hidden_size, ends=ends, initial=init, state=state
            )
        if self.stage.first:
            self.position = PositionEmbedding(
                cfg.max_position_embeddings, cfg.hidden_size, initial=init, state=state
            )
            self.dropout = Dropout(cfg.embd_pdrop, state=state)
        self.layers = nn.ModuleDict({str(i): Block(cfg, state=state) for i in self.stage.blocks})
        if self.stage.last:
            self.norm = LayerNorm(cfg.hidden_size, cfg.layer_norm_eps, state=state)
            if not cfg.tie_word_embeddings:
                self.head = VocabParallelHead(cfg.hidden_size, cfg.vocab_size, initial=init, state=state)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        stage: Stage | None = None,
    ) -> Tensor:
        stage = stage or self.stage
        x_BSD, scope = x, AttentionScope(positions, cache, state=self.state)
        if stage.first:
            if positions is None:
                positions = default_positions(x, self.state, embedded=False)
            x_BSD = self.dropout(self.position(self.embed(x), positions))
        for block in self.blocks_of(stage):
            x_BSD = block(x_BSD, scope)
        return self.finish(scope.asked(x_BSD)) if stage.last else x_BSD


def residual_initial(cfg: GPT2Config) -> Normal:
    """What joins the residual stream starts smaller, by the number of joins (Radford et al. 2019, 2.3)."""
    return Normal(cfg.initializer_range / sqrt(2 * cfg.num_hidden_layers))


GPT2_FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    GPT2Config,
    GPT2,
    NAMES,
    ignorable=("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
    optional_prefix="transformer.",
)
