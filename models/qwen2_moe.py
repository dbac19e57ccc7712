"""Qwen 1.5 and 2 with experts: beside them one more net for all tokens, behind a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from ..layers import Attention, GatedMLP, GatedShared
from .base.config import without
from .base.family import Family
from .base.names import Rename
from .expert_block import EXPERT_NAMES, mixture, softmax_router
from .llama import NAMES, Llama, grouped_attention
from .qwen import HEAD_NORMS
from .qwen_moe import Qwen3MoeConfig


class Qwen2MoeConfig(Qwen3MoeConfig):
    """The fields of a Qwen 2 config.json with experts; blocks of ``mlp_only_layers`` have none."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **without(Qwen3MoeConfig.HARMLESS, *HEAD_NORMS),
        **dict.fromkeys(HEAD_NORMS, (False,)),
        "attention_bias": (True,),  # on queries, keys and values: qkv_bias says it
    }

    num_local_experts: int = Field(default=60, gt=0, le=2**12)
    num_experts_per_tok: int = Field(default=4, gt=0)
    moe_intermediate_size: int = Field(default=1408, gt=0, le=2**22)
    shared_expert_intermediate_size: int = Field(default=5632, gt=0, le=2**22)
    qkv_bias: bool = True

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().read({"num_key_value_heads": 16, **raw}, where)

    @property
    def tensor_units(self) -> dict[str, int]:
        shared = self.shared_expert_intermediate_size
        return {**super().tensor_units, "shared_expert_intermediate_size": shared}


class Qwen2Moe(Llama):
    """Qwen 2 with experts, or this pipeline rank's stage of it."""

    config: Qwen2MoeConfig

    def attention(self, number: int) -> Attention:
        return grouped_attention(self.config, self.state, qkv_bias=self.config.qkv_bias)

    def feed_forward(self, number: int) -> nn.Module:
        cfg, initial, state = self.config, self.initial, self.state
        if not cfg.has_experts(number):
            return super().feed_forward(number)
        wide = cfg.shared_expert_intermediate_size
        net = GatedMLP(cfg.hidden_size, wide, act=cfg.hidden_act, initial=initial, state=state)
        shared = GatedShared(cfg.hidden_size, net, initial=initial, state=state)
        router = softmax_router(cfg, state, normalize=cfg.norm_topk_prob)
        return mixture(cfg, router, cfg.moe_intermediate_size, state, shared=shared)


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    Qwen2MoeConfig,
    Qwen2Moe,
    (
        *NAMES,
        *EXPERT_NAMES,
        Rename("layers.{i}.mlp.shared.gate", "model.layers.{i}.mlp.shared_expert_gate.weight"),
        *(
            Rename(
                f"layers.{{i}}.mlp.shared.net.{ours}.weight",
                f"model.layers.{{i}}.mlp.shared_expert.{hf}.weight",
            )
            for ours, hf in (("gate_up.gate", "gate_proj"), ("gate_up.up", "up_proj"), ("down", "down_proj"))
        ),
    ),
)
