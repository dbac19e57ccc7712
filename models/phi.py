"""Phi 1, 1.5 and 2: GPT-NeoX with one norm for both branches, and a bias in the output layer too. Phi 3, 3.5
and 4: Llama whose queries, keys and values, and gate and up, are stored as one; longrope.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from .base.family import Family
from .base.keys import NO, YES, ZERO, DropoutRate, Epsilon, Factor, Fixed, Share, Whole, key
from .base.names import Entry, fused
from .base.parts import layer_norm
from .gpt_neox import GPTJBlock, GPTNeoXConfig
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


PHI = Family(
    "phi",
    "PhiForCausalLM",
    PhiConfig,
    decoder(GPTJBlock, make_norm=layer_norm, embedding_dropout="embd_pdrop", biased_head=True),
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

    #: No dropout behind the embedding: transformers and Microsoft's code compute none.
    FIXED: ClassVar[Fixed] = {**dict.fromkeys(("attention_bias", "mlp_bias"), NO), "embd_pdrop": ZERO}
    UNPADDED: ClassVar[bool] = True

    max_position_embeddings: Whole = 4096
    original_max_position_embeddings: Whole = 4096
    rms_norm_eps: Epsilon = 1e-5
    residual_dropout: DropoutRate = key("resid_pdrop", default=0.0)
    sliding_window: Whole | None = None

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        return super().prepare({"original_max_position_embeddings": 4096, **fields}, where)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        kind = getattr(self.rope_scaling, "rope_type", "longrope")
        self.require(kind == "longrope", where, "rope_scaling.rope_type", "'longrope' or null", kind)


class Phi3Block(DropoutBlock):
    """Compute a block of Phi 3, 3.5 or 4.

    x = x + dropout(attention(attention_norm(x)))    * a window
    x = x + dropout(mlp(mlp_norm(x)))
    """


PHI3 = Family("phi3", "Phi3ForCausalLM", Phi3Config, decoder(Phi3Block), PHI3_NAMES)
