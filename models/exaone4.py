"""EXAONE 4: norms after each branch and of each head; where blocks have windows, those alone are rotated."""

from typing import Any, ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import BadInput, ParallelState
from .base.family import Family
from .base.keys import MOST_BLOCKS, NO, Epsilon, Fixed, Whole
from .base.parts import attention, gated_mlp, head_rms_norm, rms_norm
from .layer_types import FULL, LayerTypesConfig
from .llama import decoder
from .olmo import NAMES
from .qwen import HEAD_NORMS


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


class Exaone4Block(nn.Module):
    """Compute a block of EXAONE 4.

    x = x + after_attention(attention(x))    * norms behind branches and of heads; a window, or no rotation
    x = x + after_mlp(mlp(x))
    """

    def __init__(self, cfg: Exaone4Config, number: int, state: ParallelState) -> None:
        super().__init__()
        rotary, window, norms = cfg.rotation(number), cfg.window(number), head_rms_norm(cfg, state)
        self.attention = attention(cfg, state, qk_norm=norms, rotary=rotary, window=window)
        self.after_attention = rms_norm(cfg, state)
        self.mlp, self.after_mlp = gated_mlp(cfg, state), rms_norm(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.after_attention(self.attention(x_BSD, inputs))
        x_BSD = x_BSD + self.after_mlp(self.mlp(x_BSD))
        return x_BSD


EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", Exaone4Config, decoder(Exaone4Block), NAMES)
