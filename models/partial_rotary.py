"""Define the config fields of Llama's relatives that rotate a share of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..parallel_state import BadInput
from .base.config import without
from .base.rope_config import take_share
from .llama import LlamaConfig


class PartialRotaryConfig(LlamaConfig):
    """Llama's fields and the share; transformers 5 has it among the ``rope_parameters``."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = without(
        LlamaConfig.HARMLESS, "partial_rotary_factor"
    )

    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        raw, share = take_share(raw, where)
        fields = super().read(raw, where)
        return fields if share is None else {**fields, "partial_rotary_factor": share}

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def check(self, where: str) -> None:
        super().check(where)
        if self.rotary_dim % 2 or not self.rotary_dim:
            expected = f"a share of head_dim={self.head_dim} that is an even number of it"
            raise BadInput(
                where, "partial_rotary_factor", expected=expected, found=self.partial_rotary_factor
            )
