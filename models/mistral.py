"""Mistral: Llama without biases, whose tokens see the last ``sliding_window`` tokens alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.parts import attention, gated_mlp, rms_norm
from .llama import NAMES, LlamaConfig, RotaryDecoder


class MistralConfig(LlamaConfig):
    """List the fields of a Mistral config.json; ``sliding_window`` null: no window (from version 0.2 on)."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LlamaConfig.HARMLESS,
        **dict.fromkeys(("attention_bias", "mlp_bias"), (False,)),
    }

    max_position_embeddings: int = Field(default=131072, gt=0)
    sliding_window: int | None = Field(default=4096, gt=0)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        fields = super().read(raw, where)
        if "sliding_window" in raw:  # null says something, which elsewhere is as if the key were absent
            fields["sliding_window"] = raw["sliding_window"]
        return fields

    @property
    def layer_type(self) -> str:
        return "full_attention" if self.sliding_window is None else "sliding_attention"


class MistralBlock(nn.Module):
    """Compute a block of Mistral. Source: Jiang et al. 2023.

    x = x + attention(attention_norm(x))    * a window
    x = x + mlp(mlp_norm(x))
    """

    def __init__(self, cfg: MistralConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        self.attention_norm, self.attention = (
            rms_norm(cfg, state),
            attention(cfg, state, window=cfg.sliding_window),
        )
        self.mlp_norm, self.mlp = rms_norm(cfg, state), gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class Mistral(RotaryDecoder):
    """Compute Mistral, or the stage that this pipeline rank holds."""

    config: MistralConfig
    Block = MistralBlock


MISTRAL = Family("mistral", "MistralForCausalLM", MistralConfig, Mistral, NAMES)
