"""GLM-4.5: Llama with experts behind a first few blocks, sigmoid scores and biases that balance them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from ..layers import Attention, GatedMLP, TopKRouter
from ..parallel_state import BadInput
from .base.config import without
from .base.family import Family
from .base.names import Rename
from .expert_block import EXPERT_NAMES, NarrowExpertsConfig, mixture
from .llama import Llama, grouped_attention
from .partial_rotary import PartialRotaryConfig
from .qwen import QWEN3


class Glm4MoeConfig(PartialRotaryConfig, NarrowExpertsConfig):
    """The fields of a GLM-4.5 config.json that the model computes with.

    The first ``first_k_dense_replace`` blocks have no experts. transformers has no balance loss for it, so
    there is none by default. ``num_nextn_predict_layers``: blocks after the last one that predict further
    tokens; they are left out, as transformers does.
    """

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        # It has a choice in these two.
        **without(NarrowExpertsConfig.HARMLESS, "use_qk_norm", "partial_rotary_factor"),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    }
    OWN_NAMES: ClassVar[Mapping[str, str]] = {
        "n_routed_experts": "num_local_experts",
        "num_mtp_layers": "num_nextn_predict_layers",  # transformers 5's name
    }

    num_local_experts: int = Field(default=128, gt=0, le=2**12)
    num_experts_per_tok: int = Field(default=8, gt=0)
    moe_intermediate_size: int = Field(default=1408, gt=0, le=2**22)
    n_shared_experts: int = Field(default=1, gt=0, le=2**10)
    n_group: int = Field(default=1, gt=0)
    topk_group: int = Field(default=1, gt=0)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = Field(default=1.0, gt=0, le=1e3)
    first_k_dense_replace: int = Field(default=1, ge=0)
    num_nextn_predict_layers: int = Field(default=1, ge=0, le=2**10)
    use_qk_norm: bool = False
    partial_rotary_factor: float = Field(default=0.5, gt=0, le=1)
    max_position_embeddings: int = Field(default=131072, gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().read({"num_key_value_heads": 8, **raw}, where)

    def check(self, where: str) -> None:
        super().check(where)
        if self.first_k_dense_replace >= self.num_hidden_layers:
            expected = f"less than num_hidden_layers={self.num_hidden_layers}: a block with experts"
            raise BadInput(
                where, "first_k_dense_replace", expected=expected, found=self.first_k_dense_replace
            )
        experts = self.num_local_experts
        if experts % self.n_group or experts < 2 * self.n_group:
            expected = f"a divisor of n_routed_experts={experts}, with at least 2 experts a group"
            raise BadInput(where, "n_group", expected=expected, found=self.n_group)
        most, each = self.n_group, experts // self.n_group
        if self.topk_group > most or self.num_experts_per_tok > each * self.topk_group:
            expected = (
                f"1 to {most} groups of {each} that hold num_experts_per_tok={self.num_experts_per_tok}"
            )
            raise BadInput(where, "topk_group", expected=expected, found=self.topk_group)

    @property
    def balance_factor(self) -> float:
        return 0.0

    @property
    def further_blocks(self) -> int:
        return self.num_nextn_predict_layers

    def has_experts(self, number: int) -> bool:
        return number >= self.first_k_dense_replace

    def to_hf(self) -> dict[str, Any]:
        written = super().to_hf()
        del written["router_aux_loss_coef"]
        return {**written, "n_routed_experts": written.pop("num_local_experts")}


class Glm4Moe(Llama):
    """GLM-4.5, or this pipeline rank's stage of it."""

    config: Glm4MoeConfig

    def attention(self, number: int) -> Attention:
        cfg = self.config
        return grouped_attention(cfg, self.state, qkv_bias=cfg.attention_bias, head_norms=cfg.use_qk_norm)

    def feed_forward(self, number: int) -> nn.Module:
        """One net in the first blocks; then experts, and beside them one more net for all tokens."""
        cfg = self.config
        if not cfg.has_experts(number):
            return super().feed_forward(number)
        router = TopKRouter(
            cfg.hidden_size,
            cfg.num_local_experts,
            cfg.num_experts_per_tok,
            score="sigmoid",
            normalize=cfg.norm_topk_prob,
            scale=cfg.routed_scaling_factor,
            groups=cfg.n_group,
            groups_kept=cfg.topk_group,
            bias_corrected=True,
            initial=self.initial,
            state=self.state,
        )
        shared = GatedMLP(
            cfg.hidden_size,
            cfg.n_shared_experts * cfg.moe_intermediate_size,
            act=cfg.hidden_act,
            initial=self.initial,
            state=self.state,
        )
        return mixture(cfg, router, cfg.moe_intermediate_size, self.state, shared=shared)


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    Glm4MoeConfig,
    Glm4Moe,
    (
        *QWEN3.rules,
        *EXPERT_NAMES,
        Rename("layers.{i}.mlp.router.bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"),
        *(
            Rename(
                f"layers.{{i}}.mlp.shared.{ours}.weight", f"model.layers.{{i}}.mlp.shared_experts.{hf}.weight"
            )
            for ours, hf in (("gate_up.gate", "gate_proj"), ("gate_up.up", "up_proj"), ("down", "down_proj"))
        ),
    ),
    further="model.layers.{i}.",
)
