"""Define the config fields, names and layers that Llama's relatives with experts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..parallel_state import BadInput
from .base.fields import NO, Experts, Fixed, Whole, Width
from .base.keys import MOST_EXPERTS
from .base.names import Entry, per_expert
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
        """Tell whether block ``number`` has experts, or one net."""
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
