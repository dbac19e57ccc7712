"""OLMo 3: OLMo 2 with a window in three of four blocks; the others alone stretch their positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs, RotaryEmbedding
from ..parallel_state import ParallelState
from .base.family import Family
from .base.fields import Factor
from .base.parts import AttentionOptions, attention, gated_mlp, rms_norm
from .layer_ropes import LayerRopesConfig
from .llama import RotaryDecoder
from .olmo2 import NAMES, Olmo2Config, head_norm


class Olmo3Config(Olmo2Config, LayerRopesConfig):
    """List the fields of an OLMo 3 config.json."""

    PATTERN: ClassVar[int] = 4

    rope_theta: Factor = 500000.0


class Olmo3Block(nn.Module):
    """Compute a block of OLMo 3 (OLMo Team 2025).

    x = x + after_attention(attention(x))    * as OLMo 2; three of four: a window, its own rotation
    x = x + after_mlp(mlp(x))
    """

    def __init__(self, cfg: Olmo3Config, number: int, state: ParallelState) -> None:
        super().__init__()
        bias, norms = cfg.attention_bias, head_norm(cfg, state)
        options = AttentionOptions(qk_norm=norms, rotary=cfg.kind(number), window=cfg.window(number))
        self.attention = attention(cfg, state, qkv_bias=bias, out_bias=bias, **options)
        self.after_attention = rms_norm(cfg, state)
        self.mlp, self.after_mlp = gated_mlp(cfg, state), rms_norm(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.after_attention(self.attention(x_BSD, inputs))
        x_BSD = x_BSD + self.after_mlp(self.mlp(x_BSD))
        return x_BSD


class Olmo3(RotaryDecoder):
    """Compute OLMo 3, or the stage that this pipeline rank holds: two rotations."""

    config: Olmo3Config
    Block = Olmo3Block

    def make_rotary(self) -> Mapping[str, RotaryEmbedding]:
        return self.config.rotations()


OLMO3 = Family("olmo3", "Olmo3ForCausalLM", Olmo3Config, Olmo3, NAMES)
