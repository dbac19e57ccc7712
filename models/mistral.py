"""Mistral: Llama without biases, whose tokens see the last ``sliding_window`` tokens alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..layers import Attention
from .base.family import Family
from .llama import NAMES, Llama, LlamaConfig, grouped_attention


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


class Mistral(Llama):
    """Compute Mistral, or the stage that this pipeline rank holds."""

    config: MistralConfig

    def attention(self, number: int) -> Attention:
        return grouped_attention(self.config, self.state, window=self.config.sliding_window)


MISTRAL = Family("mistral", "MistralForCausalLM", MistralConfig, Mistral, NAMES)
