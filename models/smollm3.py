"""SmolLM 3: Llama in which some blocks, by default every fourth one, have no positions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import Factor, Whole
from .base.parts import attention, gated_mlp, rms_norm
from .llama import LLAMA_NAMES, decoder
from .qwen import NoWindowsConfig


class SmolLM3Config(NoWindowsConfig):
    """List the fields of a SmolLM 3 config.json.

    ``no_rope_layers``: 1 for each block that rotates its heads, 0 for one that does not.
    """

    # By default transformers pads with a token that other vocabularies do not have.
    ADDED: ClassVar[Mapping[str, object]] = {"pad_token_id": None}

    num_key_value_heads: Whole = 4
    max_position_embeddings: Whole = 32768
    rope_theta: Factor = 2e6
    tie_word_embeddings: bool = True
    no_rope_layers: tuple[Annotated[int, Field(ge=0, le=1)], ...] = ()
    no_rope_layer_interval: Whole = 4

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        stated, blocks = len(self.no_rope_layers), self.num_hidden_layers
        fits = not stated or stated >= blocks
        self.require(fits, where, "no_rope_layers", f"a number for each of {blocks} blocks", stated)

    def rotation(self, number: int) -> str | None:
        stated, interval = self.no_rope_layers, self.no_rope_layer_interval
        return "all" if (stated[number] if stated else (number + 1) % interval) else None

    def to_hf(self) -> dict[str, Any]:
        return {**super().to_hf(), "no_rope_layers": [*self.no_rope_layers] or None}


class SmolLM3Block(nn.Module):
    """Compute a block of SmolLM 3.

    x = x + attention(attention_norm(x))    * no rotation in every fourth block
    x = x + mlp(mlp_norm(x))
    """

    def __init__(self, cfg: SmolLM3Config, number: int, state: ParallelState) -> None:
        super().__init__()
        rotary = cfg.rotation(number)
        self.attention_norm, self.attention = rms_norm(cfg, state), attention(cfg, state, rotary=rotary)
        self.mlp_norm, self.mlp = rms_norm(cfg, state), gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", SmolLM3Config, decoder(SmolLM3Block), LLAMA_NAMES)
