"""EXAONE 4: norms after each branch and of each head; where blocks have windows, those alone are rotated."""

from typing import Any, ClassVar

from ..parallel_state import BadInput
from .base.family import Family
from .base.keys import MOST_BLOCKS, NO, Epsilon, Fixed, Whole
from .base.parts import head_rms_norm
from .layer_types import FULL, LayerTypesConfig
from .llama import decoder
from .olmo import NAMES, Olmo2Block
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


class Exaone4Block(Olmo2Block):
    """Compute a block of EXAONE 4, which is OLMo 2's but for the heads' norms.

    x = x + after_attention(attention(x))    * norms behind branches and of heads; a window, or no rotation
    x = x + after_mlp(mlp(x))
    """

    head_norm = staticmethod(head_rms_norm)


EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", Exaone4Config, decoder(Exaone4Block), NAMES)
