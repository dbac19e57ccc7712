"""Define the Llamas that are measured, by a few numbers, and build them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..models import family_of

if TYPE_CHECKING:
    from ..models import CausalLM


def llama(
    width: int, layers: int, *, ids: int, heads: int = 8, groups: int = 4, length: int = 512, **other: Any
) -> dict[str, Any]:
    """Return a config of Llama's proportions: ``ids`` in the vocabulary, ``groups`` of key/value heads."""
    return {
        "model_type": "llama",
        "vocab_size": ids,
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": length,
        **other,
    }


def built(config: dict[str, Any], **options: Any) -> CausalLM:
    """Build a model; ``options`` are those of its family's ``build``."""
    family = family_of(config)
    return family.build(family.from_hf(config), **options)
