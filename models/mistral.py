"""Mistral: Llama without biases, whose tokens see the last ``sliding_window`` tokens alone."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.fields import NO, Fixed, Whole
from .base.parts import attention, gated_mlp, rms_norm
from .llama import NAMES, LlamaConfig, RotaryDecoder


class MistralConfig(LlamaConfig):
    """List the fields of a Mistral config.json; ``sliding_window`` null: no window (from version 0.2 on)."""

    FIXED: ClassVar[Fixed] = dict.fromkeys(("attention_bias", "mlp_bias"), NO)

    max_position_embeddings: Whole = 131072
    sliding_window: Whole | None = 4096


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
