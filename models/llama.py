"""Llama 2 and 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import ACTIVATIONS, AttentionInputs, RotaryEmbedding
from ..parallel_state import BadInput, ParallelState
from .base.causal_lm import CausalLM
from .base.config import ModelConfig
from .base.family import Family
from .base.names import Names
from .base.parts import attention, gated_mlp, rms_norm, rotary
from .base.rope_config import ROPE_KEYS, RopeScaling, check_factors, read_rope, write_scaling


class LlamaConfig(ModelConfig):
    """List the fields of a Llama config.json that the model computes with."""

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
        kind, stated = self.layer_type, raw.get("layer_types")
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
        for key, scaling in self.scalings.items():
            check_factors(scaling, self.rotary_dim // 2, where, key)

    @property
    def layer_type(self) -> str:
        """Return transformers' name for the attention of every block."""
        return "full_attention"

    def check_heads_fill(self, where: str) -> None:
        """Refuse heads that together are not as wide as the hidden states, in families without a choice."""
        width = self.hidden_size // self.num_attention_heads
        if self.head_dim * self.num_attention_heads != self.hidden_size:
            expected = f"hidden_size / num_attention_heads = {width}"
            raise BadInput(where, "head_dim", expected=expected, found=self.head_dim)

    @property
    def scalings(self) -> dict[str, RopeScaling | None]:
        """Return each scaling of positions, under the key of the config.json that states it."""
        return {"rope_scaling": self.rope_scaling}

    @property
    def rotary_dim(self) -> int:
        """Return how many numbers of a head are rotated: the first ones. The others see no position."""
        return self.head_dim

    def to_hf(self) -> dict[str, Any]:
        # Beside ``rope_theta`` both transformers 4 and 5 read it.
        said = self.model_dump(exclude={"rope_scaling", *self.HARMLESS})
        return {**said, "rope_scaling": write_scaling(self.rope_scaling)}


#: Ours -> Hugging Face's, of Llama and of what its relatives add.
NAMES = Names(
    "model.layers.{i}",
    {"embed": "model.embed_tokens"},
    {
        "attention.qkv.q": "self_attn.q_proj",
        "attention.qkv.k": "self_attn.k_proj",
        "attention.qkv.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "mlp.gate_up.gate": "mlp.gate_proj",
        "mlp.gate_up.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    },
    {"norm": "model.norm", "head": "lm_head"},
)


class RotaryDecoder(CausalLM):
    """Rotate heads, and normalise hidden states by their root mean square, as Llama and most others do."""

    config: LlamaConfig
    make_norm: ClassVar[Callable[..., nn.Module]] = staticmethod(rms_norm)

    def make_rotary(self) -> Mapping[str, RotaryEmbedding]:
        return rotary(self.config)


class LlamaBlock(nn.Module):
    """Compute a block of Llama: a norm before each branch. Source: Touvron et al. 2023.

    x = x + attention(attention_norm(x))
    x = x + mlp(mlp_norm(x))
    """

    def __init__(self, cfg: LlamaConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        bias = cfg.attention_bias
        self.attention_norm = rms_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=bias, out_bias=bias)
        self.mlp_norm, self.mlp = rms_norm(cfg, state), gated_mlp(cfg, state, bias=cfg.mlp_bias)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class Llama(RotaryDecoder):
    """Compute Llama, or the stage that this pipeline rank holds."""

    config: LlamaConfig
    Block = LlamaBlock


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    LlamaConfig,
    Llama,
    NAMES,
    ignorable=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
)
