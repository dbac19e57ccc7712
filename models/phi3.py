"""Phi 3, 3.5 and 4: Llama whose queries, keys and values, and gate and up, are stored as one; longrope."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs, Dropout
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import NO, DropoutRate, Epsilon, Fixed, Whole
from .base.names import Entry, fused
from .base.parts import attention, gated_mlp, rms_norm
from .llama import LLAMA_NAMES, PartialRotaryConfig, decoder

#: Ours -> Hugging Face's, where a gate and what it multiplies are stored as one.
FUSED_GATE_UP: dict[str, Entry | None] = {
    "mlp.gate_up": fused("mlp.gate_up_proj", "gate up"),
    **dict.fromkeys(("mlp.gate_up.gate", "mlp.gate_up.up")),
}
NAMES = LLAMA_NAMES.but(
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
    # Transformers' default is a token that a small vocabulary does not have.
    ADDED: ClassVar[Mapping[str, object]] = {"pad_token_id": None}

    max_position_embeddings: Whole = 4096
    original_max_position_embeddings: Whole = 4096
    rms_norm_eps: Epsilon = 1e-5
    resid_pdrop: DropoutRate = 0.0
    embd_pdrop: DropoutRate = 0.0
    sliding_window: Whole | None = None

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        return super().prepare({"original_max_position_embeddings": 4096, **fields}, where)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        kind = getattr(self.rope_scaling, "rope_type", "longrope")
        self.require(kind == "longrope", where, "rope_scaling.rope_type", "'longrope' or null", kind)


class Phi3Block(nn.Module):
    """Compute a block of Phi 3, 3.5 or 4.

    x = x + dropout(attention(attention_norm(x)))    * a window
    x = x + dropout(mlp(mlp_norm(x)))
    """

    def __init__(self, cfg: Phi3Config, number: int, state: ParallelState) -> None:
        super().__init__()
        self.attention_norm = rms_norm(cfg, state)
        self.attention = attention(cfg, state, window=cfg.sliding_window)
        self.mlp_norm, self.mlp = rms_norm(cfg, state), gated_mlp(cfg, state)
        self.dropout = Dropout(cfg.resid_pdrop, state=state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


PHI3 = Family(
    "phi3", "Phi3ForCausalLM", Phi3Config, decoder(Phi3Block, embedding_dropout="embd_pdrop"), NAMES
)
