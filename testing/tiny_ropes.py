"""List the rotations of the rows of ``tiny_models``, and rows that differ only in their rotation."""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.02, 1.05],
    "long_factor": [1.08, 1.6, 4.8],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
#: Rotations by type of block, as transformers 5 writes them.
ROPES = {
    "full_attention": YARN | {"rope_theta": 5e3, "truncate": False},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
#: What the keys of transformers 4 say of these rotations.
_OLDER_KEYS = {"rope_theta": 5e3, "rope_scaling": None, "rope_local_base_freq": 300.0}


def _under_window(window: dict[str, Any], whole: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return rotations by type of block, stretched as said under a window and where there is none."""
    whole = whole or {"rope_type": "default"}
    return {
        "full_attention": whole | {"rope_theta": 5e3},
        "sliding_attention": window | {"rope_theta": 300.0},
    }


ROPE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_scaling": YARN, "num_key_value_heads": 1}),
    "llama-yarn-whole": (
        "llama",
        {"rope_scaling": YARN | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "llama-dynamic": (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 24},
    ),
    "llama-proportional": (
        "llama",
        {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
    ),
    # What is stretched under a window alone, and on both sides.
    "gemma3-window-yarn": ("gemma3_text", _OLDER_KEYS | {"rope_parameters": _under_window(YARN)}),
    "gemma3-window-dynamic": (
        "gemma3_text",
        _OLDER_KEYS
        | {"rope_parameters": _under_window({"rope_type": "dynamic", "factor": 2.0}, YARN)}
        | {"max_position_embeddings": 24},
    ),
    "olmo3-window-llama3": ("olmo3", {"rope_parameters": _under_window(LLAMA3, YARN)}),
    "olmo3-window-linear": (
        "olmo3",
        {"rope_parameters": _under_window({"rope_type": "linear", "factor": 4.0})},
    ),
}
