"""Make experts as DeepSeek and GLM-4.5 have them: in groups, beside shared ones, after some dense blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ..layers import MoE, TopKRouter
from ..parallel_state import ParallelState
from .base.fields import Experts, Whole, key
from .base.names import Entry
from .base.parts import RouterOptions, gated_mlp, mixture, router
from .expert_block import EXPERTS, NarrowExpertsConfig


class GroupedExpertsConfig(NarrowExpertsConfig):
    """List the fields of such experts. The first ``first_k_dense_replace`` blocks have none.

    transformers has no balance loss for these families, so there is none by default.
    """

    num_local_experts: Experts = key("n_routed_experts", "num_local_experts")
    n_shared_experts: int = Field(default=1, gt=0, le=2**10)
    n_group: Whole | None = 1
    topk_group: Whole | None = 1
    routed_scaling_factor: float = Field(default=1.0, gt=0, le=1e3)
    first_k_dense_replace: int = Field(default=1, ge=0)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        blocks, chosen = self.num_hidden_layers, self.num_experts_per_tok
        fits = self.first_k_dense_replace < blocks
        expected = f"less than num_hidden_layers={blocks}: a block with experts"
        self.require(fits, where, "first_k_dense_replace", expected)
        experts, (groups, kept) = self.num_local_experts, self.groups
        fits = experts % groups == 0 and experts >= 2 * groups
        expected = f"a divisor of n_routed_experts={experts}, with at least 2 experts a group"
        self.require(fits, where, "n_group", expected, groups)
        each = experts // groups
        expected = f"1 to {groups} groups of {each} that hold num_experts_per_tok={chosen}"
        self.require(kept <= groups and chosen <= each * kept, where, "topk_group", expected, kept)

    @property
    def groups(self) -> tuple[int, int]:
        """Return the number of groups of experts, and the number of them that a token's experts are in."""
        return self.n_group or 1, self.topk_group or 1

    @property
    def balance_factor(self) -> float:
        return 0.0

    def has_experts(self, number: int) -> bool:
        return number >= self.first_k_dense_replace

    def to_hf(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_hf().items() if key != "router_aux_loss_coef"}


#: Ours -> Hugging Face's; of the biases, families that have them.
GROUPED_EXPERTS: dict[str, Entry] = {
    **EXPERTS,
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared.gate_up.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.gate_up.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}


def grouped_experts(cfg: GroupedExpertsConfig, router: TopKRouter, state: ParallelState) -> MoE:
    """Make the experts of a block behind ``router``, and beside them one net for all tokens."""
    shared = gated_mlp(cfg, state, cfg.n_shared_experts * cfg.moe_intermediate_size, entered=True)
    return mixture(cfg, router, cfg.moe_intermediate_size, state, shared=shared)


def corrected_router(cfg: GroupedExpertsConfig, state: ParallelState) -> TopKRouter:
    """Make the router of DeepSeek-V3 and GLM-4.5: sigmoid scores, and biases for the choice (noaux_tc)."""
    groups, kept = cfg.groups
    options = RouterOptions(normalize=cfg.norm_topk_prob, groups=groups, groups_kept=kept)
    options |= {"score": "sigmoid", "bias_corrected": True, "scale": cfg.routed_scaling_factor}
    return router(cfg, state, **options)
