"""SmolLM 3: Llama in which some blocks, by default every fourth one, have no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import BadInput, ParallelState
from .base.family import Family
from .base.parts import attention, gated_mlp, rms_norm
from .llama import NAMES, LlamaConfig, RotaryDecoder
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


class SmolLM3Block(nn.Module):
    """Compute a block of SmolLM 3.

    x = x + attention(attention_norm(x))    * no rotation in every fourth block
    x = x + mlp(mlp_norm(x))
    """

    def __init__(self, cfg: SmolLM3Config, number: int, state: ParallelState) -> None:
        super().__init__()
        bias, rotary = cfg.attention_bias, "all" if cfg.rotates(number) else None
        self.attention_norm = rms_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=bias, out_bias=bias, rotary=rotary)
        self.mlp_norm, self.mlp = rms_norm(cfg, state), gated_mlp(cfg, state, bias=cfg.mlp_bias)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class SmolLM3(RotaryDecoder):
    """Compute SmolLM 3, or the stage that this pipeline rank holds."""

    config: SmolLM3Config
    Block = SmolLM3Block


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", SmolLM3Config, SmolLM3, NAMES)
