"""Qwen 3.5's text model: gated delta nets and gated attention as in Qwen3-Next, without experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.fields import Whole
from .base.names import fused
from .base.parts import gated_mlp
from .delta_net import (
    LINEAR,
    NAMES,
    DeltaNetConfig,
    delta_net,
    gated_attention,
    hybrid_norm,
)
from .llama import RotaryDecoder

#: How a rotation is shared out among the places of an image's pieces; a text has the same place in all three.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


class Qwen35Config(DeltaNetConfig):
    """List the fields of a Qwen 3.5 text config.json."""

    num_key_value_heads: Whole = 4

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        rope = fields.get("rope_parameters")
        if isinstance(rope, dict):
            fields["rope_parameters"] = {key: rope[key] for key in rope if key not in _OF_IMAGES}
        return super().prepare(fields, where)


class Qwen35Block(nn.Module):
    """Compute a block of Qwen 3.5. Its mixer has other names than attention, since files tell them apart.

    x = x + mixer(mixer_norm(x))            * gated delta net; norms scale by 1 + weight
    x = x + attention(attention_norm(x))    * in every fourth block: gated, heads normalised, partly rotated
    x = x + mlp(mlp_norm(x))
    """

    def __init__(self, cfg: Qwen35Config, number: int, state: ParallelState) -> None:
        super().__init__()
        self.recurrent = cfg.layer_types[number] == LINEAR
        if self.recurrent:
            self.mixer_norm, self.mixer = hybrid_norm(cfg, state), delta_net(cfg, state)
        else:
            self.attention_norm, self.attention = hybrid_norm(cfg, state), gated_attention(cfg, state)
        self.mlp_norm, self.mlp = hybrid_norm(cfg, state), gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        if self.recurrent:
            x_BSD = x_BSD + self.mixer(self.mixer_norm(x_BSD), inputs)
        else:
            x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class Qwen35(RotaryDecoder):
    """Compute Qwen 3.5, or the stage that this pipeline rank holds."""

    config: Qwen35Config
    Block = Qwen35Block
    make_norm = staticmethod(hybrid_norm)


QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    Qwen35Config,
    Qwen35,
    NAMES.but(
        {
            "mixer.qkvz": fused("linear_attn.in_proj_qkv", "q k v"),
            "mixer.qkvz.z": "linear_attn.in_proj_z",
            "mixer.ba.b": "linear_attn.in_proj_b",
            "mixer.ba.a": "linear_attn.in_proj_a",
        }
    ),
    further="mtp.",
)
