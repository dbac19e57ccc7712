"""The config fields of Llama's relatives whose blocks see a window of tokens, or all before them."""

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
        return fields

    def check_stated(self, raw: Mapping[str, Any], where: str) -> None:
        kinds, count = self.layer_types, self.num_hidden_layers
        if kinds and (len(kinds) != count or set(kinds) - {SLIDING, FULL}):
            expected = f"{SLIDING} or {FULL} for each of {count} blocks"
            raise BadInput(where, "layer_types", expected=expected, found=repr(list(kinds))[:80])

    def slides(self, number: int) -> bool:
        """Return whether block ``number`` is one with a window."""
        return self.layer_types[number] == SLIDING if self.layer_types else (number + 1) % self.PATTERN != 0

    def window(self, number: int) -> int | None:
        """Return how many tokens a token of block ``number`` sees; ``None``: all before it."""
        return self.sliding_window if self.slides(number) else None

    def to_hf(self) -> dict[str, Any]:
        return {**super().to_hf(), "layer_types": [*self.layer_types] or None}
