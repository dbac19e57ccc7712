"""Qwen3-Next: three blocks with a gated delta net to one with gated attention, and experts in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from .base.config import without
from .base.family import Family
from .base.hugging_face_names import Split
from .delta_net import DELTA_NAMES, DeltaNetConfig, DeltaNetHybrid
from .llama import GATED_MLP
from .qwen2_moe import SHARED_MIXTURE_NAMES, SharedExpertConfig, shared_mixture


class Qwen3NextConfig(DeltaNetConfig, SharedExpertConfig):
    """List the fields of a Qwen3-Next config.json; blocks of ``mlp_only_layers`` have one net.

    Published checkpoints hold one block more, under ``mtp``, which predicts further tokens; it is left out,
    as transformers does.
    """

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = without(
        SharedExpertConfig.HARMLESS, "partial_rotary_factor"
    )

    num_local_experts: int = Field(default=512, gt=0, le=2**12)
    num_experts_per_tok: int = Field(default=10, gt=0)
    moe_intermediate_size: int = Field(default=512, gt=0, le=2**22)
    shared_expert_intermediate_size: int = Field(default=512, gt=0, le=2**22)
    norm_topk_prob: bool = True

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().read({"num_key_value_heads": 2, **raw}, where)

    @property
    def further_blocks(self) -> int:
        return 1


class Qwen3Next(DeltaNetHybrid):
    """Compute Qwen3-Next, or the stage that this pipeline rank holds."""

    config: Qwen3NextConfig

    def feed_forward(self, number: int) -> nn.Module:
        if not self.config.has_experts(number):
            return super().feed_forward(number)
        return shared_mixture(self.config, self.state)


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    Qwen3NextConfig,
    Qwen3Next,
    (
        *DELTA_NAMES,
        # A key head's queries and keys come together with its values, and with their gates.
        Split(
            tuple(f"layers.{{i}}.mixer.qkvz.{one}.weight" for one in ("q", "k", "v", "z")),
            "model.layers.{i}.linear_attn.in_proj_qkvz.weight",
            groups="linear_num_key_heads",
        ),
        Split(
            tuple(f"layers.{{i}}.mixer.ba.{one}.weight" for one in ("b", "a")),
            "model.layers.{i}.linear_attn.in_proj_ba.weight",
            groups="linear_num_key_heads",
        ),
        *GATED_MLP,
        *SHARED_MIXTURE_NAMES,
    ),
    further="mtp.",
)
