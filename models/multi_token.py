"""Define the config fields of families whose checkpoints hold blocks of multi-token prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base.fields import key
from .grouped_experts import GroupedExpertsConfig


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
