"""SmolLM 3: Llama in which some blocks, by default every fourth one, have no positions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from .base.family import Family
from .base.keys import Factor, Whole
from .llama import LLAMA_NAMES, Llama
from .qwen import NoWindowsConfig


class SmolLM3Config(NoWindowsConfig):
    """List the fields of a SmolLM 3 config.json; its blocks are Llama's.

    ``no_rope_layers``: 1 for each block that rotates its heads, 0 for one that does not.
    """

    UNPADDED: ClassVar[bool] = True

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


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", SmolLM3Config, Llama, LLAMA_NAMES)
