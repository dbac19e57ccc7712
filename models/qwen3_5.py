"""Qwen 3.5's text model: gated delta nets and gated attention as in Qwen3-Next, without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base.family import Family
from .base.hugging_face_names import Split, in_blocks
from .delta_net import DELTA_NAMES, DeltaNetConfig, DeltaNetHybrid
from .llama import GATED_MLP

#: How a rotation is shared out among the places of an image's pieces; a text has the same place in all three.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


class Qwen35Config(DeltaNetConfig):
    """List the fields of a Qwen 3.5 text config.json."""

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        rope = raw.get("rope_parameters")
        if isinstance(rope, dict):
            raw = {**raw, "rope_parameters": {key: rope[key] for key in rope if key not in _OF_IMAGES}}
        return super().read({"num_key_value_heads": 4, **raw}, where)


QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    Qwen35Config,
    DeltaNetHybrid,
    (
        *DELTA_NAMES,
        Split(
            tuple(f"layers.{{i}}.mixer.qkvz.{one}.weight" for one in ("q", "k", "v")),
            "model.layers.{i}.linear_attn.in_proj_qkv.weight",
        ),
        *in_blocks(
            ("mixer.qkvz.z", "linear_attn.in_proj_z"),
            ("mixer.ba.b", "linear_attn.in_proj_b"),
            ("mixer.ba.a", "linear_attn.in_proj_a"),
        ),
        *GATED_MLP,
    ),
    further="mtp.",
)
