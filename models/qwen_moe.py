"""Qwen 3 with experts, in all blocks or in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import nn

from ..parallel_state import BadInput
from .base.config import MOST_BLOCKS
from .base.family import Family
from .expert_block import EXPERT_NAMES, NarrowExpertsConfig, mixture, softmax_router
from .qwen import HEAD_NORMS, QWEN3, Qwen3, check_no_windows


class Qwen3MoeConfig(NarrowExpertsConfig):
    """List the fields of a Qwen 3 config.json with experts; blocks of ``mlp_only_layers`` have none."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **NarrowExpertsConfig.HARMLESS,
        **dict.fromkeys(HEAD_NORMS, (True,)),
        "scoring_func": ("softmax",),
    }
    #: transformers 4 writes the one, transformers 5 the other.
    OWN_NAMES: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}

    num_local_experts: int = Field(default=128, gt=0, le=2**12)
    num_experts_per_tok: int = Field(default=8, gt=0)
    moe_intermediate_size: int = Field(default=768, gt=0, le=2**22)
    decoder_sparse_step: int = Field(default=1, gt=0)
    mlp_only_layers: tuple[Annotated[int, Field(ge=0, lt=MOST_BLOCKS)], ...] = ()
    max_position_embeddings: int = Field(default=32768, gt=0)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        check_no_windows(raw, where)
        fields = super().read({"num_key_value_heads": 4, **raw}, where)
        if isinstance(fields.get("mlp_only_layers"), list):
            fields["mlp_only_layers"] = tuple(fields["mlp_only_layers"])
        return fields

    @classmethod
    def read_keys(cls) -> set[str]:
        return {*super().read_keys(), *QWEN3.config.read_keys()}

    def check(self, where: str) -> None:
        super().check(where)
        absent = [number for number in self.mlp_only_layers if number >= self.num_hidden_layers]
        if absent:
            expected = f"numbers of the {self.num_hidden_layers} blocks, from 0"
            raise BadInput(where, "mlp_only_layers", expected=expected, found=absent[0])
        if not self.blocks_with_experts:
            found = f"decoder_sparse_step={self.decoder_sparse_step} of {self.num_hidden_layers} blocks"
            raise BadInput(where, "mlp_only_layers", expected="a block with experts", found=found)

    def has_experts(self, number: int) -> bool:
        return number not in self.mlp_only_layers and (number + 1) % self.decoder_sparse_step == 0

    def to_hf(self) -> dict[str, Any]:
        written = {key: value for key, value in super().to_hf().items() if key not in self.NOT_KEYS}
        layers = [*self.mlp_only_layers]
        return {**written, "num_experts": self.num_local_experts, "mlp_only_layers": layers}


class Qwen3Moe(Qwen3):
    """Compute Qwen 3 with experts, or the stage that this pipeline rank holds."""

    config: Qwen3MoeConfig

    def feed_forward(self, number: int) -> nn.Module:
        cfg = self.config
        if not cfg.has_experts(number):
            return super().feed_forward(number)
        router = softmax_router(cfg, self.state, normalize=cfg.norm_topk_prob)
        return mixture(cfg, router, cfg.moe_intermediate_size, self.state)


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    Qwen3MoeConfig,
    Qwen3Moe,
    (*QWEN3.rules, *EXPERT_NAMES),
)
