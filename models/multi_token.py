"""Define the config fields of families whose checkpoints hold blocks of multi-token prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..parallel_state import BadInput
from .grouped_experts import GroupedExpertsConfig


class MultiTokenConfig(GroupedExpertsConfig):
    """List the fields of such blocks. ``num_nextn_predict_layers``: how many there are after the last block.

    ``mtp``: the model has them, and they can be trained. Without it their tensors are not read, as by
    transformers, whose configs do not have this field.
    """

    OWN_NAMES: ClassVar[Mapping[str, str]] = {
        **GroupedExpertsConfig.OWN_NAMES,
        "num_mtp_layers": "num_nextn_predict_layers",  # transformers 5's name
    }

    num_nextn_predict_layers: int = Field(default=1, ge=0, le=2**10)
    mtp: bool = False

    def check(self, where: str) -> None:
        super().check(where)
        if self.mtp and not self.num_nextn_predict_layers:
            expected = "1 or more with mtp, which trains blocks that predict further tokens"
            raise BadInput(where, "num_nextn_predict_layers", expected=expected, found=0)

    @property
    def further_blocks(self) -> int:
        return 0 if self.mtp else self.num_nextn_predict_layers

    @property
    def mtp_blocks(self) -> int:
        return self.num_nextn_predict_layers if self.mtp else 0

    def to_hf(self) -> dict[str, Any]:
        written = super().to_hf()
        return written if self.mtp else {key: value for key, value in written.items() if key != "mtp"}
