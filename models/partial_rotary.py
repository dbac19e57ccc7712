"""Define the config fields of Llama's relatives that rotate a share of each head."""

from collections.abc import Mapping
from typing import Any

from .base.fields import Share
from .base.rope_config import take_share
from .llama import LlamaConfig


class PartialRotaryConfig(LlamaConfig):
    """Llama's fields and the share; transformers 5 has it among the ``rope_parameters``."""

    partial_rotary_factor: Share = 1.0

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        fields, share = take_share(fields, where)
        return {**super().prepare(fields, where), "partial_rotary_factor": share}

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        expected = f"a share of head_dim={self.head_dim} that is an even number of it"
        even = self.rotary_dim and self.rotary_dim % 2 == 0
        self.require(even, where, "partial_rotary_factor", expected)
