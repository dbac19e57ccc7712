"""Define config fields for families in which some blocks see a window of tokens and others all earlier
tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .base.fields import Whole
from .base.keys import MOST_BLOCKS, names
from .llama import LlamaConfig

SLIDING, FULL = "sliding_attention", "full_attention"


class LayerTypesConfig(LlamaConfig):
    """Llama's fields, the window, and which blocks have it; ``sliding_window`` null: none has."""

    #: Unless ``layer_types`` says otherwise, every so many blocks one has no window.
    PATTERN: ClassVar[int] = 2
    READ: ClassVar[frozenset[str]] = names("sliding_window_pattern")

    sliding_window: Whole | None = 4096
    layer_types: tuple[str, ...] = ()

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        every, blocks = fields.get("sliding_window_pattern"), fields.get("num_hidden_layers")
        stated = fields.get("layer_types") is not None
        if not stated and isinstance(every, int) and isinstance(blocks, int) and every > 0:
            numbers = range(1, min(blocks, MOST_BLOCKS) + 1)
            fields["layer_types"] = tuple(SLIDING if number % every else FULL for number in numbers)
        return super().prepare(fields, where)

    def check_layer_types(self, stated: object, where: str) -> None:
        kinds, blocks = self.layer_types, self.num_hidden_layers
        fits = not kinds or (len(kinds) == blocks and set(kinds) <= {SLIDING, FULL})
        self.require(fits, where, "layer_types", f"{SLIDING} or {FULL} for each of {blocks} blocks", [*kinds])

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
