"""Phi 1, 1.5 and 2: GPT-NeoX with one norm for both branches, and a bias in the output layer too. Phi 3, 3.5
and 4: Llama whose queries, keys and values, and gate and up, are stored as one; longrope.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs, Dropout, LayerNorm
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import NO, YES, ZERO, DropoutRate, Epsilon, Factor, Fixed, Share, Whole, key
from .base.names import Entry, fused
from .base.parts import HeadNorm, attention, layer_norm, mlp
from .gpt_neox import GPTNeoXConfig
from .llama import LLAMA_NAMES, DropoutBlock, PartialRotaryConfig, decoder

NAMES = LLAMA_NAMES.but(
    {
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "attention.out": "self_attn.dense",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    },
    norm="model.final_layernorm",
)


class PhiConfig(GPTNeoXConfig):
    """List the fields of a Phi config.json."""

    FIXED: ClassVar[Fixed] = {
        **dict.fromkeys(("attention_bias", "use_parallel_residual"), YES),
        "hidden_dropout": ZERO,
        "tie_word_embeddings": NO,
    }

    num_key_value_heads: Whole
    hidden_act: str = "gelu_new"
    rope_theta: Factor = key("rope_theta", default=10000.0)
    partial_rotary_factor: Share = key("partial_rotary_factor", default=0.5)
    qk_layernorm: bool = False
    resid_pdrop: DropoutRate = 0.0
    embd_pdrop: DropoutRate = 0.0


class PhiBlock(nn.Module):
    """Compute a block of Phi or GPT-J. Source: Gunasekar et al. 2023; Wang and Komatsuzaki 2021.

    y = attention_norm(x)                                 * one LayerNorm for both branches
    x = x + dropout(attention(y)) + dropout(mlp(y))       * side by side; biases (GPT-J: of mlp alone); GELU
    """

    def __init__(self, cfg: Any, number: int, state: ParallelState) -> None:
        super().__init__()
        norm = head_norm(cfg, state) if getattr(cfg, "qk_layernorm", False) else None
        self.attention_norm = layer_norm(cfg, state)
        self.attention = attention(cfg, number, state, qk_norm=norm)
        self.mlp, self.dropout = mlp(cfg, state), Dropout(cfg.resid_pdrop, state=state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        y_BSD = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.dropout(self.attention(y_BSD, inputs)) + self.dropout(self.mlp(y_BSD))
        return x_BSD


def head_norm(cfg: PhiConfig, state: ParallelState) -> HeadNorm:
    """Return what makes the LayerNorm of each head of queries and keys, with one weight for all."""
    return lambda heads: LayerNorm(cfg.head_dim, cfg.layer_norm_eps, heads=True, state=state)


PHI = Family(
    "phi",
    "PhiForCausalLM",
    PhiConfig,
    decoder(PhiBlock, make_norm=layer_norm, embedding_dropout="embd_pdrop", biased_head=True),
    NAMES,
)


#: Ours -> Hugging Face's, where a gate and what it multiplies are stored as one.
FUSED_GATE_UP: dict[str, Entry | None] = {
    "mlp.gate_up": fused("mlp.gate_up_proj", "gate up"),
    **dict.fromkeys(("mlp.gate_up.gate", "mlp.gate_up.up")),
}
PHI3_NAMES = LLAMA_NAMES.but(
    {
        "attention.qkv": fused("self_attn.qkv_proj", "q k v"),
        **dict.fromkeys(("attention.qkv.q", "attention.qkv.k", "attention.qkv.v")),
        **FUSED_GATE_UP,
    }
)


class Phi3Config(PartialRotaryConfig):
    """List the fields of a Phi 3 config.json.

    ``original_max_position_embeddings`` is where longrope changes its factors, wherever a config has it.
    """

    FIXED: ClassVar[Fixed] = dict.fromkeys(("attention_bias", "mlp_bias"), NO)
    UNPADDED: ClassVar[bool] = True

    max_position_embeddings: Whole = 4096
    original_max_position_embeddings: Whole = 4096
    rms_norm_eps: Epsilon = 1e-5
    residual_dropout: DropoutRate = key("resid_pdrop", default=0.0)
    embd_pdrop: DropoutRate = 0.0
    sliding_window: Whole | None = None

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        return super().prepare({"original_max_position_embeddings": 4096, **fields}, where)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        kind = getattr(self.rope_scaling, "rope_type", "longrope")
        self.require(kind == "longrope", where, "rope_scaling.rope_type", "'longrope' or null", kind)


class Phi3Block(DropoutBlock):
    """Compute a block of Phi 3, 3.5 or 4, or of Seed-OSS.

    x = x + dropout(attention(attention_norm(x)))    * a window; Seed-OSS: none, biases on q, k, v
    x = x + dropout(mlp(mlp_norm(x)))
    """

    def __init__(self, cfg: Any, number: int, state: ParallelState) -> None:
        out_bias = getattr(cfg, "attention_out_bias", False)
        super().__init__(cfg, number, state, out_bias=out_bias)


PHI3 = Family(
    "phi3", "Phi3ForCausalLM", Phi3Config, decoder(Phi3Block, embedding_dropout="embd_pdrop"), PHI3_NAMES
)
