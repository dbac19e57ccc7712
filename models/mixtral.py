"""Mixtral: Mistral with experts in every block, of which a token goes through a few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from .base.family import Family
from .base.hugging_face_names import Rename, Stack
from .expert_block import ExpertsConfig, mixture, softmax_router
from .llama import NAMES
from .mistral import Mistral, MistralConfig


class MixtralConfig(MistralConfig, ExpertsConfig):
    """List the fields of a Mixtral config.json that the model computes with."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **MistralConfig.HARMLESS,
        "router_jitter_noise": (0, 0.0),
        "norm_topk_prob": (True,),
        "scoring_func": ("softmax",),
    }

    num_local_experts: int = Field(default=8, gt=0, le=2**12)
    num_experts_per_tok: int = Field(default=2, gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)
    rope_theta: float = Field(default=1e6, gt=0)
    sliding_window: int | None = Field(default=None, gt=0)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        # Hugging Face's default is a number; null means as many as query heads.
        return super().read({"num_key_value_heads": 8, **raw}, where)


class Mixtral(Mistral):
    """Compute Mixtral, or the stage that this pipeline rank holds."""

    config: MixtralConfig

    def feed_forward(self, number: int) -> nn.Module:
        router = softmax_router(self.config, self.state, normalize=True)
        return mixture(self.config, router, self.config.intermediate_size, self.state)


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    MixtralConfig,
    Mixtral,
    (
        *NAMES,
        Rename("layers.{i}.mlp.router.weight", "model.layers.{i}.block_sparse_moe.gate.weight"),
        *(
            Stack(
                f"layers.{{i}}.mlp.experts.{ours}",
                f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.{hf}.weight",
            )
            for ours, hf in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        ),
    ),
)
