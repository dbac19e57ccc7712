"""Cohere's Command R7B and A: Command R with a window in most blocks, whose heads alone are rotated."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.fields import NO, YES, Factor, Fixed
from .base.parts import attention, gated_mlp
from .cohere import Cohere, CohereConfig, unbiased_norm
from .layer_types import LayerTypesConfig
from .llama import NAMES


class Cohere2Config(CohereConfig, LayerTypesConfig):
    """List the fields of a Command R7B config.json."""

    PATTERN: ClassVar[int] = 4
    FIXED: ClassVar[Fixed] = {
        "use_qk_norm": NO,
        **dict.fromkeys(("use_gated_activation", "use_parallel_block"), YES),
        "use_parallel_embedding": NO,
        "order_of_interleaved_layers": ("local_attn_first",),
    }

    rope_theta: Factor = 10000.0


class Cohere2Block(nn.Module):
    """Compute a block of Command R7B.

    y = attention_norm(x)                 * one LayerNorm, without bias, for both branches
    x = x + attention(y) + mlp(y)         * side by side; a window and rotation in three of four blocks
    """

    def __init__(self, cfg: Cohere2Config, number: int, state: ParallelState) -> None:
        super().__init__()
        bias, window = cfg.attention_bias, cfg.window(number)
        rotary = None if window is None else "all"
        self.attention_norm = unbiased_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=bias, out_bias=bias, rotary=rotary, window=window)
        self.mlp = gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        y_BSD = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.attention(y_BSD, inputs) + self.mlp(y_BSD)
        return x_BSD


class Cohere2(Cohere):
    """Compute Command R7B, or the stage that this pipeline rank holds."""

    config: Cohere2Config
    Block = Cohere2Block


COHERE2 = Family("cohere2", "Cohere2ForCausalLM", Cohere2Config, Cohere2, NAMES)
