"""Llama 2 and 3.    B batch  S sequence  D hidden  E head dim  H query heads here  K key/value heads here"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import (
    ACTIVATIONS,
    AttentionScope,
    ColumnParallelLinear,
    GatedMLP,
    KeyValueCache,
    RMSNorm,
    Rope,
    RotaryEmbedding,
    RowParallelLinear,
    SharedHeads,
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
from .base.names import Rename
from .base.rope_config import ROPE_KEYS, RopeScaling, read_rope, write_rope


class LlamaConfig(ModelConfig):
    """The fields of a Llama config.json that the model computes with."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm", "use_mrope"), (False,)),
        **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "logits_scaling", "logit_scale"), (1, 1.0)),
        **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), (1, 1.0)),
    }

    vocab_size: int = Field(gt=0, le=2**24)
    hidden_size: int = Field(gt=0, le=2**20)
    intermediate_size: int = Field(gt=0, le=2**22)
    num_hidden_layers: int = Field(gt=0, le=2**12)
    num_attention_heads: int = Field(gt=0, le=2**16)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, le=2**16, multiple_of=2)
    hidden_act: str = "silu"
    max_position_embeddings: int = Field(default=2048, gt=0)
    initializer_range: float = Field(default=0.02, ge=0, le=10)
    rms_norm_eps: float = Field(default=1e-6, gt=0, lt=0.1)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        fields = super().read(raw, where) | read_rope(raw, where)
        heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
        # Hugging Face's default; a checkpoint with fewer key/value heads is refused by its tensors' shapes.
        fields.setdefault("num_key_value_heads", heads)
        if "head_dim" not in fields and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            if hidden % heads:
                raise BadInput(
                    where, "hidden_size", expected=f"a multiple of {heads} heads, or head_dim", found=hidden
                )
            fields["head_dim"] = hidden // heads
        return fields

    @classmethod
    def read_keys(cls) -> set[str]:
        return {*ROPE_KEYS, "layer_types"}

    def check_stated(self, raw: Mapping[str, Any], where: str) -> None:
        kind = "full_attention" if self.window is None else "sliding_attention"
        stated = raw.get("layer_types")
        if stated is not None and stated != [kind] * self.num_hidden_layers:
            expected = f"{kind} for every one of {self.num_hidden_layers} blocks"
            raise BadInput(where, "layer_types", expected=expected, found=repr(stated)[:80])

    def check(self, where: str) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise BadInput(
                where,
                "num_key_value_heads",
                expected=f"a divisor of num_attention_heads={self.num_attention_heads}",
                found=self.num_key_value_heads,
            )
        if self.hidden_act not in ACTIVATIONS:
            raise BadInput(
                where, "hidden_act", expected=f"one of {', '.join(ACTIVATIONS)}", found=repr(self.hidden_act)
            )

    # What the families that share this model differ in.
    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def out_bias(self) -> bool:
        """Whether attention's output has a bias too."""
        return self.attention_bias

    @property
    def rotated(self) -> int:
        """How many of a head's numbers, the first ones, are rotated; the others have no position."""
        return self.head_dim

    @property
    def head_norms(self) -> bool:
        """Whether each head's query and key are normalised before they are rotated."""
        return False

    @property
    def window(self) -> int | None:
        """How many tokens a token sees, itself included; ``None``: all before it."""
        return None

    @property
    def scaling(self) -> dict[str, Any] | None:
        return self.rope_scaling.model_dump() if self.rope_scaling else None

    def to_hf(self) -> dict[str, Any]:
        return write_rope(self.model_dump(exclude={"rope_scaling", *self.HARMLESS}), self.rope_scaling)


#: Ours -> Hugging Face's. A rule whose tensor the config leaves out (biases, an untied head) does nothing.
NAMES = (
    Rename("embed.weight", "model.embed_tokens.weight"),
    *(
        Rename(f"layers.{{i}}.attention.qkv.{one}.{kind}", f"model.layers.{{i}}.self_attn.{one}_proj.{kind}")
        for one in ("q", "k", "v")
        for kind in ("weight", "bias")
    ),
    *(
        Rename(f"layers.{{i}}.{ours}.{kind}", f"model.layers.{{i}}.{hf}.{kind}")
        for ours, hf in (
            ("attention.out", "self_attn.o_proj"),
            ("mlp.gate_up.gate", "mlp.gate_proj"),
            ("mlp.gate_up.up", "mlp.up_proj"),
            ("mlp.down", "mlp.down_proj"),
        )
        for kind in ("weight", "bias")
    ),
    Rename("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    Rename("layers.{i}.mlp_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    Rename("norm.weight", "model.norm.weight"),
    Rename("head.weight", "lm_head.weight"),
)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. The cut never runs through a head."""

    def __init__(self, cfg: LlamaConfig, *, state: ParallelState | None = None) -> None:
        super().__init__()
        self.head_dim, self.dropout = cfg.head_dim, cfg.attention_dropout
        self.state = state or ParallelState.alone()
        q, kv = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
        init = Normal(cfg.initializer_range)
        self.qkv = ColumnParallelLinear(
            cfg.hidden_size,
            {"q": q, "k": kv, "v": kv},
            cfg.qkv_bias,
            unit=cfg.head_dim,
            shared=("k", "v"),
            initial=init,
            state=state,
        )
        self.q_norm, self.k_norm = (
            RMSNorm(cfg.head_dim, cfg.rms_norm_eps, heads=True, state=state)
            if cfg.head_norms
            else nn.Identity()
            for _ in range(2)
        )
        self.shared = SharedHeads(cfg.num_attention_heads, cfg.num_key_value_heads, state=state)
        self.out = RowParallelLinear(
            q, cfg.hidden_size, cfg.out_bias, unit=cfg.head_dim, initial=init, state=state
        )

    def forward(self, x_BSD: Tensor, rope: Rope, scope: AttentionScope) -> Tensor:
        q_BHSE, k_BKSE, v_BKSE = (split_heads(t, self.head_dim) for t in self.qkv(x_BSD))
        q_BHSE, k_BKSE = rope(self.q_norm(q_BHSE)), rope(self.k_norm(k_BKSE))
        k_BKSE, v_BKSE = map(self.shared, scope.extend(self, k_BKSE, v_BKSE))
        dropout = self.dropout if self.training else 0.0
        with own_random(self.state, split=dropout > 0):
            heads_BHSE = causal_attention(q_BHSE, k_BKSE, v_BKSE, scope, dropout=dropout)
        out: Tensor = self.out(merge_heads(heads_BHSE))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream and added to it."""

    def __init__(self, cfg: LlamaConfig, number: int, *, state: ParallelState | None = None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, state=state)
        self.attention = Attention(cfg, state=state)
        self.mlp_norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, state=state)
        self.mlp = self.feed_forward(cfg, number, state)

    def feed_forward(self, cfg: LlamaConfig, number: int, state: ParallelState | None) -> nn.Module:
        """That of block ``number``; families with experts have another."""
        return GatedMLP(
            cfg.hidden_size,
            cfg.intermediate_size,
            act=cfg.hidden_act,
            bias=cfg.mlp_bias,
            initial=Normal(cfg.initializer_range),
            state=state,
        )

    def forward(self, x_BSD: Tensor, rope: Rope, scope: AttentionScope) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope, scope)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class Llama(CausalLM):
    """Llama, or this pipeline rank's stage of it."""

    config: LlamaConfig
    block: type[Block] = Block

    def __init__(
        self, cfg: LlamaConfig, *, split: Sequence[int] | None = None, state: ParallelState | None = None
    ) -> None:
        super().__init__()
        self.config, self.state = cfg, state or ParallelState.alone()
        self.stage = Stage.of(cfg.num_hidden_layers, split=split, state=state)
        init = Normal(cfg.initializer_range)
        tied_here = self.stage.last and cfg.tie_word_embeddings
        if self.stage.first or tied_here:
            ends = cfg.tie_word_embeddings and not (self.stage.first and self.stage.last)
            self.embed = VocabParallelEmbedding(
                cfg.vocab_size, cfg.hidden_size, ends=ends, initial=init, state=state
            )
        self.rotary = RotaryEmbedding(cfg.rotated, cfg.rope_theta, cfg.scaling)
        self.layers = nn.ModuleDict({str(i): self.block(cfg, i, state=state) for i in self.stage.blocks})
        if self.stage.last:
            self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, state=state)
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
        given, window = positions, self.config.window
        if positions is None:
            positions = default_positions(x, self.state, embedded=not stage.first)
        scope = AttentionScope(positions if window else given, cache, window=window, state=self.state)
        x_BSD = self.embed(x) if stage.first else x
        rope = self.rotary(positions, x_BSD.dtype)
        for block in self.blocks_of(stage):
            x_BSD = block(x_BSD, rope, scope)
        return self.finish(scope.asked(x_BSD)) if stage.last else x_BSD


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    LlamaConfig,
    Llama,
    NAMES,
    ignorable=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
)
