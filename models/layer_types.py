"""Define config fields for families in which some blocks see a window of tokens and others all earlier
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..parallel_state import BadInput
from .llama import LlamaConfig

SLIDING, FULL = "sliding_attention", "full_attention"


class LayerTypesConfig(LlamaConfig):
    """Llama's fields, the window, and which blocks have it; ``sliding_window`` null: none has."""

    #: Unless ``layer_types`` says otherwise, every so many blocks one has no window.
    PATTERN: ClassVar[int] = 2

    sliding_window: int | None = Field(default=4096, gt=0)
    layer_types: tuple[str, ...] = ()

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        fields = super().read(raw, where)
        if "sliding_window" in raw:  # null says: none
            fields["sliding_window"] = raw["sliding_window"]
        if isinstance(fields.get("layer_types"), list):
            fields["layer_types"] = tuple(fields["layer_types"])
        every, blocks = raw.get("sliding_window_pattern"), fields.get("num_hidden_layers")
        if "layer_types" not in fields and isinstance(every, int) and isinstance(blocks, int) and every > 0:
            fields["layer_types"] = tuple(FULL if (i + 1) % every == 0 else SLIDING for i in range(blocks))
        return fields

    @classmethod
    def read_keys(cls) -> set[str]:
        return {*super().read_keys(), "sliding_window_pattern"}

    def check_stated(self, raw: Mapping[str, Any], where: str) -> None:
        kinds, count = self.layer_types, self.num_hidden_layers
        if kinds and (len(kinds) != count or set(kinds) - {SLIDING, FULL}):
            expected = f"{SLIDING} or {FULL} for each of {count} blocks"
            raise BadInput(where, "layer_types", expected=expected, found=repr(list(kinds))[:80])

    def kind(self, number: int) -> str:
        """Return transformers' name for the attention of block ``number``."""
        if self.layer_types:
            return self.layer_types[number]
        return SLIDING if (number + 1) % self.PATTERN else FULL

    def window(self, number: int) -> int | None:
        """Return how many tokens a token of block ``number`` sees; ``None``: all before it."""
        return self.sliding_window if self.kind(number) == SLIDING else None

    def to_hf(self) -> dict[str, Any]:
        return {**super().to_hf(), "layer_types": [*self.layer_types] or None}
