"""Qwen 1.5 and 2 with experts: beside them one more net for all tokens, behind a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from ..layers import Attention, GatedMLP, GatedShared, MoE
from ..parallel_state import Normal, ParallelState
from .base.config import names, without
from .base.family import Family
from .base.hugging_face_names import Rename, Rule, in_blocks
from .expert_block import EXPERT_NAMES, mixture, softmax_router
from .llama import NAMES, Llama, grouped_attention
from .qwen import HEAD_NORMS
from .qwen_moe import Qwen3MoeConfig


class SharedExpertConfig(Qwen3MoeConfig):
    """List the fields of Qwen's experts, and the width of the net for all tokens beside them."""

    NOT_KEYS: ClassVar[frozenset[str]] = names("num_local_experts")

    shared_expert_intermediate_size: int = Field(default=5632, gt=0, le=2**22)

    @property
    def tensor_units(self) -> dict[str, int]:
        shared = self.shared_expert_intermediate_size
        return {**super().tensor_units, "shared_expert_intermediate_size": shared}


class Qwen2MoeConfig(SharedExpertConfig):
    """List the fields of a Qwen 2 config.json with experts; blocks of ``mlp_only_layers`` have none."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **without(Qwen3MoeConfig.HARMLESS, *HEAD_NORMS),
        **dict.fromkeys(HEAD_NORMS, (False,)),
        "attention_bias": (True,),  # on queries, keys and values: qkv_bias says it
    }

    num_local_experts: int = Field(default=60, gt=0, le=2**12)
    num_experts_per_tok: int = Field(default=4, gt=0)
    moe_intermediate_size: int = Field(default=1408, gt=0, le=2**22)
    qkv_bias: bool = True

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().read({"num_key_value_heads": 16, **raw}, where)


class Qwen2Moe(Llama):
    """Compute Qwen 2 with experts, or the stage that this pipeline rank holds."""

    config: Qwen2MoeConfig

    def attention(self, number: int) -> Attention:
        return grouped_attention(self.config, self.state, qkv_bias=self.config.qkv_bias)

    def feed_forward(self, number: int) -> nn.Module:
        if not self.config.has_experts(number):
            return super().feed_forward(number)
        return shared_mixture(self.config, self.state)


def shared_mixture(cfg: SharedExpertConfig, state: ParallelState) -> MoE:
    """Make the experts of a block and, beside them, the net for all tokens behind its gate."""
    initial, wide = Normal(cfg.initializer_range), cfg.shared_expert_intermediate_size
    net = GatedMLP(cfg.hidden_size, wide, act=cfg.hidden_act, entered=True, initial=initial, state=state)
    shared = GatedShared(cfg.hidden_size, net, initial=initial, state=state)
    router = softmax_router(cfg, state, normalize=cfg.norm_topk_prob)
    return mixture(cfg, router, cfg.moe_intermediate_size, state, shared=shared)


#: Ours -> Hugging Face's, of the experts and the net beside them.
SHARED_MIXTURE_NAMES: tuple[Rule, ...] = (
    *EXPERT_NAMES,
    Rename("layers.{i}.mlp.shared.gate", "model.layers.{i}.mlp.shared_expert_gate.weight"),
    *in_blocks(
        ("mlp.shared.net.gate_up.gate", "mlp.shared_expert.gate_proj"),
        ("mlp.shared.net.gate_up.up", "mlp.shared_expert.up_proj"),
        ("mlp.shared.net.down", "mlp.shared_expert.down_proj"),
    ),
)

QWEN2_MOE = Family(
    "qwen2_moe", "Qwen2MoeForCausalLM", Qwen2MoeConfig, Qwen2Moe, (*NAMES, *SHARED_MIXTURE_NAMES)
)
