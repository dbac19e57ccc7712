"""Qwen 3 with experts, in all blocks or in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import BadInput, ParallelState
from .base.config import MOST_BLOCKS
from .base.family import Family
from .base.parts import attention, gated_mlp, head_rms_norm, mixture, rms_norm, router
from .expert_block import EXPERTS, NarrowExpertsConfig
from .llama import NAMES, RotaryDecoder
from .qwen import HEAD_NORMS, QWEN3, check_no_windows


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


class Qwen3MoeBlock(nn.Module):
    """Compute a block of Qwen 3 with experts.

    x = x + attention(attention_norm(x))    * heads of queries and keys normalised
    x = x + mlp(mlp_norm(x))                * experts, or in some blocks one net
    """

    def __init__(self, cfg: Qwen3MoeConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        bias, norms = cfg.attention_bias, head_rms_norm(cfg, state)
        self.attention_norm = rms_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=bias, out_bias=bias, qk_norm=norms)
        self.mlp_norm = rms_norm(cfg, state)
        if cfg.has_experts(number):
            chosen_by = router(cfg, state, normalize=cfg.norm_topk_prob)
            self.mlp: nn.Module = mixture(cfg, chosen_by, cfg.moe_intermediate_size, state)
        else:
            self.mlp = gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class Qwen3Moe(RotaryDecoder):
    """Compute Qwen 3 with experts, or the stage that this pipeline rank holds."""

    config: Qwen3MoeConfig
    Block = Qwen3MoeBlock


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    Qwen3MoeConfig,
    Qwen3Moe,
    NAMES.but(EXPERTS),
)
