"""Config fields, names and layers of experts: alone, in groups beside shared ones, and with MTP blocks."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..layers import MoE
from ..parallel_state import BadInput, ParallelState
from .base.keys import MOST_EXPERTS, NO, Experts, Fixed, Whole, Width, key
from .base.names import Entry, per_expert
from .base.parts import RouterOptions, gated_mlp, mixture
from .llama import LlamaConfig


class ExpertsConfig(LlamaConfig):
    """Llama's fields and those of the experts.

    As in transformers ``router_aux_loss_coef`` counts only with ``output_router_logits``. There the loss is
    over the tokens of a batch and all routers together; here it is of each row and router, and a mean over
    the routers: the same number for one row and one router, and here the same in every layout.
    """

    num_local_experts: Experts
    num_experts_per_tok: Whole
    output_router_logits: bool = False
    router_aux_loss_coef: float = Field(default=0.001, ge=0, le=1e3)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        experts = self.num_local_experts
        fits = not experts or self.num_experts_per_tok <= experts
        expected = f"at most {self.spelled('num_local_experts')}={experts}"
        self.require(fits, where, "num_experts_per_tok", expected)

    def check_count(self, where: str) -> None:
        """Refuse more blocks, or more experts in them, than could be listed."""
        super().check_count(where)
        blocks, experts = self.num_hidden_layers, self.num_local_experts
        if blocks * experts > MOST_EXPERTS:
            expected = f"at most {MOST_EXPERTS} in all blocks together"
            raise BadInput(where, "experts", expected=expected, found=f"{experts} in each of {blocks}")

    @property
    def balance_factor(self) -> float:
        """The factor of each router's balance loss, unless a recipe says another."""
        return self.router_aux_loss_coef / self.blocks_with_experts if self.output_router_logits else 0.0

    def has_experts(self, number: int) -> bool:
        return True

    @property
    def blocks_with_experts(self) -> int:
        """Return how many blocks have experts."""
        return sum(map(self.has_experts, range(self.num_hidden_layers)))


class NarrowExpertsConfig(ExpertsConfig):
    """List the fields where experts have a width of their own, and some blocks may have one net instead."""

    FIXED: ClassVar[Fixed] = {"mlp_bias": NO}

    moe_intermediate_size: Width
    norm_topk_prob: bool = False

    @property
    def tensor_units(self) -> dict[str, int]:
        units = {**super().tensor_units, "moe_intermediate_size": self.moe_intermediate_size}
        if self.blocks_with_experts == self.num_hidden_layers:  # no block has the one net that this would cut
            del units["intermediate_size"]
        return units


#: Ours -> Hugging Face's, of a router and experts by the names of most families.
EXPERTS: dict[str, Entry] = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.gate": per_expert("mlp.experts.{e}.gate_proj.weight"),
    "mlp.experts.up": per_expert("mlp.experts.{e}.up_proj.weight"),
    "mlp.experts.down": per_expert("mlp.experts.{e}.down_proj.weight"),
}


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
        blocks, top_k = self.num_hidden_layers, self.num_experts_per_tok
        fits = self.first_k_dense_replace < blocks
        expected = f"less than num_hidden_layers={blocks}: a block with experts"
        self.require(fits, where, "first_k_dense_replace", expected)
        experts, (groups, chosen) = self.num_local_experts, self.groups
        fits = experts % groups == 0 and experts >= 2 * groups
        expected = f"a divisor of n_routed_experts={experts}, with at least 2 experts a group"
        self.require(fits, where, "n_group", expected, groups)
        group_size = experts // groups
        expected = f"1 to {groups} groups of {group_size} that hold num_experts_per_tok={top_k}"
        self.require(chosen <= groups and top_k <= group_size * chosen, where, "topk_group", expected, chosen)

    @property
    def groups(self) -> tuple[int, int]:
        """Return the number of groups of experts, and the number of them that a token's experts are in."""
        return self.n_group or 1, self.topk_group or 1

    @property
    def routing(self) -> RouterOptions:
        """Return how the router chooses: by sigmoid scores, with biases for the choice (noaux_tc)."""
        groups, chosen = self.groups
        options = RouterOptions(normalize=self.norm_topk_prob, groups=groups, groups_kept=chosen)
        options |= {"score": "sigmoid", "bias_corrected": True, "scale": self.routed_scaling_factor}
        return options

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


def grouped_mixture(cfg: Any, state: ParallelState) -> MoE:
    """Make experts behind a router, and beside them one net for all tokens."""
    shared = gated_mlp(cfg, state, cfg.n_shared_experts * cfg.moe_intermediate_size, entered=True)
    return mixture(cfg, state, cfg.moe_intermediate_size, shared=shared, **cfg.routing)


class MultiTokenConfig(GroupedExpertsConfig):
    """List the fields of such blocks. ``num_nextn_predict_layers``: how many there are after the last block.

    ``mtp``: the model has them, and they can be trained. Without it their tensors are not read, as by
    transformers, whose configs do not have this field.
    """

    # The second one is transformers 5's.
    num_nextn_predict_layers: int = key(
        "num_nextn_predict_layers", "num_mtp_layers", default=1, ge=0, le=2**10
    )
    mtp: bool = False

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        expected = "1 or more with mtp, which trains blocks that predict further tokens"
        fits = self.num_nextn_predict_layers or not self.mtp
        self.require(fits, where, "num_nextn_predict_layers", expected)

    @property
    def further_blocks(self) -> int:
        return 0 if self.mtp else self.num_nextn_predict_layers

    @property
    def mtp_blocks(self) -> int:
        return self.num_nextn_predict_layers if self.mtp else 0

    def to_hf(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_hf().items() if self.mtp or key != "mtp"}
