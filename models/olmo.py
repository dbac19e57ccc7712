"""OLMo 2 and 3: norms behind each branch, and over all queries and all keys of a token; then windows.
EXAONE 4: norms behind branches and of each head; where blocks have windows, those alone are rotated.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs, HeadsRMSNorm
from ..parallel_state import BadInput, ParallelState
from .base.family import Family
from .base.keys import ABSENT, MOST_BLOCKS, NO, Epsilon, Factor, Fixed, Whole
from .base.parts import HeadNorm, attention, gated_mlp, head_rms_norm, rms_norm
from .layer_types import FULL, LayerRopesConfig, LayerTypesConfig
from .llama import LLAMA_NAMES, LlamaConfig, decoder
from .qwen import HEAD_NORMS

NAMES = LLAMA_NAMES.but(
    {
        **dict.fromkeys(("attention_norm", "mlp_norm")),
        "after_attention": "post_attention_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }
)


class Olmo2Config(LlamaConfig):
    """List the fields of an OLMo 2 config.json."""

    FIXED: ClassVar[Fixed] = {**HEAD_NORMS, "mlp_bias": NO, "clip_qkv": ABSENT}

    rms_norm_eps: Epsilon = 1e-5


def head_norm(cfg: Olmo2Config, state: ParallelState) -> HeadNorm:
    """Return what makes the norm over all heads of queries, and that over all heads of keys."""
    return lambda heads: HeadsRMSNorm(heads, cfg.head_dim, cfg.rms_norm_eps, state=state)


class Olmo2Block(nn.Module):
    """Compute a block of OLMo 2 or 3 (OLMo Team 2025).

    x = x + after_attention(attention(x))    * norms behind branches; all queries, all keys normed;
                                             * OLMo 3: in three of four a window, its own rotation
    x = x + after_mlp(mlp(x))
    """

    head_norm: ClassVar[Callable[..., HeadNorm]] = staticmethod(head_norm)

    def __init__(self, cfg: LlamaConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        self.attention = attention(cfg, number, state, qk_norm=self.head_norm(cfg, state))
        self.after_attention = rms_norm(cfg, state)
        self.mlp, self.after_mlp = gated_mlp(cfg, state), rms_norm(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.after_attention(self.attention(x_BSD, inputs))
        x_BSD = x_BSD + self.after_mlp(self.mlp(x_BSD))
        return x_BSD


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", Olmo2Config, decoder(Olmo2Block), NAMES)


class Olmo3Config(Olmo2Config, LayerRopesConfig):
    """List the fields of an OLMo 3 config.json."""

    PATTERN: ClassVar[int] = 4

    rope_theta: Factor = 500000.0


OLMO3 = Family("olmo3", "Olmo3ForCausalLM", Olmo3Config, decoder(Olmo2Block), NAMES)


class Exaone4Config(LayerTypesConfig):
    """List the fields of an EXAONE 4 config.json."""

    PATTERN: ClassVar[int] = 4
    FIXED: ClassVar[Fixed] = {**HEAD_NORMS, **dict.fromkeys(("attention_bias", "mlp_bias"), NO)}

    num_key_value_heads: Whole = 32
    rms_norm_eps: Epsilon = 1e-5

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        fields = super().prepare(fields, where)
        if fields.get("layer_types") is None and isinstance(fields.get("sliding_window_pattern"), str):
            expected = "a list of the blocks' types beside a sliding_window_pattern of letters"
            raise BadInput(where, "layer_types", expected=expected, found=None)
        blocks, window = fields.get("num_hidden_layers"), fields.get("sliding_window", 1)
        if fields.get("layer_types") is None and window is None and isinstance(blocks, int):
            fields["layer_types"] = (FULL,) * min(blocks, MOST_BLOCKS)
        return fields

    def rotation(self, number: int) -> str | None:
        return "all" if self.window(number) or self.sliding_window is None else None


class Exaone4Block(Olmo2Block):
    """Compute a block of EXAONE 4, which is OLMo 2's but for the heads' norms.

    x = x + after_attention(attention(x))    * norms behind branches and of heads; a window, or no rotation
    x = x + after_mlp(mlp(x))
    """

    head_norm = staticmethod(head_rms_norm)


EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", Exaone4Config, decoder(Exaone4Block), NAMES)
