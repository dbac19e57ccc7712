"""Phi 3, 3.5 and 4: Llama whose queries, keys and values, and gate and up, are stored as one; longrope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs, Dropout
from ..parallel_state import BadInput, ParallelState
from .base.family import Family
from .base.names import Entry, fused
from .base.parts import attention, gated_mlp, rms_norm
from .llama import NAMES as LLAMA_NAMES
from .llama import RotaryDecoder
from .partial_rotary import PartialRotaryConfig

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
    """List the fields of a Phi 3 config.json that the model computes with.

    ``original_max_position_embeddings`` is where longrope changes its factors, wherever a config has it.
    """

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **PartialRotaryConfig.HARMLESS,
        **dict.fromkeys(("attention_bias", "mlp_bias"), (False,)),
    }

    max_position_embeddings: int = Field(default=4096, gt=0)
    original_max_position_embeddings: int = Field(default=4096, gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)
    resid_pdrop: float = Field(default=0.0, ge=0, lt=1)
    embd_pdrop: float = Field(default=0.0, ge=0, lt=1)
    sliding_window: int | None = Field(default=None, gt=0)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().read({"original_max_position_embeddings": 4096, **raw}, where)

    def check(self, where: str) -> None:
        super().check(where)
        if self.rope_scaling is not None and self.rope_scaling.rope_type != "longrope":
            found = repr(self.rope_scaling.rope_type)
            raise BadInput(where, "rope_scaling.rope_type", expected="'longrope' or null", found=found)

    def to_hf(self) -> dict[str, Any]:
        # Transformers' default is a token that a small vocabulary does not have.
        return {**super().to_hf(), "pad_token_id": None}

    @property
    def layer_type(self) -> str:
        return "full_attention" if self.sliding_window is None else "sliding_attention"


class Phi3Block(nn.Module):
    """Compute a block of Phi 3, 3.5 or 4.

    x = x + dropout(attention(attention_norm(x)))    * a window
    x = x + dropout(mlp(mlp_norm(x)))
    """

    def __init__(self, cfg: Phi3Config, number: int, state: ParallelState) -> None:
        super().__init__()
        self.attention_norm, self.attention = (
            rms_norm(cfg, state),
            attention(cfg, state, window=cfg.sliding_window),
        )
        self.mlp_norm, self.mlp = rms_norm(cfg, state), gated_mlp(cfg, state)
        self.dropout = Dropout(cfg.resid_pdrop, state=state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


class Phi3(RotaryDecoder):
    """Compute Phi 3, or the stage that this pipeline rank holds."""

    config: Phi3Config
    Block = Phi3Block
    embedding_dropout = "embd_pdrop"


PHI3 = Family("phi3", "Phi3ForCausalLM", Phi3Config, Phi3, NAMES)
