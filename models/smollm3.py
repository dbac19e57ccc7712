"""SmolLM 3: Llama in which some blocks, by default every fourth one, have no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ..layers import Attention
from ..parallel_state import BadInput
from .base.family import Family
from .llama import NAMES, Llama, LlamaConfig, grouped_attention
from .qwen import WINDOWS, check_no_windows


class SmolLM3Config(LlamaConfig):
    """List the fields of a SmolLM 3 config.json that the model computes with, and transformers' defaults.

    ``no_rope_layers``: 1 for each block that rotates its heads, 0 for one that does not.
    """

    max_position_embeddings: int = Field(default=32768, gt=0)
    rope_theta: float = Field(default=2e6, gt=0)
    tie_word_embeddings: bool = True
    no_rope_layers: tuple[Annotated[int, Field(ge=0, le=1)], ...] = ()
    no_rope_layer_interval: int = Field(default=4, gt=0)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        check_no_windows(raw, where)
        fields = super().read({"num_key_value_heads": 4, **raw}, where)
        if isinstance(fields.get("no_rope_layers"), list):
            fields["no_rope_layers"] = tuple(fields["no_rope_layers"])
        return fields

    @classmethod
    def read_keys(cls) -> set[str]:
        return {*super().read_keys(), *WINDOWS}

    def check(self, where: str) -> None:
        super().check(where)
        if self.no_rope_layers and len(self.no_rope_layers) < self.num_hidden_layers:
            expected = f"a number for each of {self.num_hidden_layers} blocks"
            raise BadInput(where, "no_rope_layers", expected=expected, found=len(self.no_rope_layers))

    def rotates(self, number: int) -> bool:
        """Return whether block ``number`` rotates its heads."""
        if self.no_rope_layers:
            return self.no_rope_layers[number] == 1
        return (number + 1) % self.no_rope_layer_interval != 0

    def to_hf(self) -> dict[str, Any]:
        layers = [*self.no_rope_layers] or None
        # By default transformers pads with a token that other vocabularies do not have.
        return {**super().to_hf(), "no_rope_layers": layers, "pad_token_id": None}


class SmolLM3(Llama):
    """Compute SmolLM 3, or the stage that this pipeline rank holds."""

    config: SmolLM3Config

    def attention(self, number: int) -> Attention:
        cfg = self.config
        rotary = "all" if cfg.rotates(number) else None
        return grouped_attention(
            cfg, self.state, qkv_bias=cfg.attention_bias, out_bias=cfg.attention_bias, rotary=rotary
        )


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", SmolLM3Config, SmolLM3, NAMES)
