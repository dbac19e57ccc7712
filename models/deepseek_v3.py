"""DeepSeek-V3: DeepSeek-V2 with sigmoid scores of experts and biases that balance them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs, RotaryEmbedding
from ..parallel_state import ParallelState
from .base.family import Family
from .base.fields import Experts, Fixed, Whole, Width
from .base.parts import gated_mlp, rms_norm, rotary
from .deepseek_v2 import NAMES, LatentAttentionConfig, latent_attention
from .grouped_experts import corrected_router, grouped_experts
from .llama import RotaryDecoder
from .multi_token import MultiTokenConfig


class DeepseekV3Config(LatentAttentionConfig, MultiTokenConfig):
    """List the fields of a DeepSeek-V3 config.json.

    ``rope_interleave``: the numbers of a rotated pair are neighbours.
    """

    FIXED: ClassVar[Fixed] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}

    num_key_value_heads: Whole = 128
    num_local_experts: Experts = 256
    num_experts_per_tok: Whole = 8
    moe_intermediate_size: Width = 2048
    n_group: Whole = 8
    topk_group: Whole = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = Field(default=2.5, gt=0, le=1e3)
    first_k_dense_replace: int = Field(default=3, ge=0)
    rope_interleave: bool = True
    max_position_embeddings: Whole = 4096


class DeepseekV3Block(nn.Module):
    """Compute a block of DeepSeek-V3 (DeepSeek-AI 2024).

    x = x + attention(attention_norm(x))    * multi-head latent attention
    x = x + mlp(mlp_norm(x))                * after the first blocks: experts and a net for all tokens
    """

    def __init__(self, cfg: DeepseekV3Config, number: int, state: ParallelState) -> None:
        super().__init__()
        self.attention_norm, self.attention = rms_norm(cfg, state), latent_attention(cfg, state)
        self.mlp_norm = rms_norm(cfg, state)
        if cfg.has_experts(number):
            self.mlp: nn.Module = grouped_experts(cfg, corrected_router(cfg, state), state)
        else:
            self.mlp = gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class DeepseekV3(RotaryDecoder):
    """Compute DeepSeek-V3, or the stage that this pipeline rank holds."""

    config: DeepseekV3Config
    Block = DeepseekV3Block

    def make_rotary(self) -> Mapping[str, RotaryEmbedding]:
        return rotary(self.config, interleaved=self.config.rope_interleave)


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    DeepseekV3Config,
    DeepseekV3,
    NAMES,
    further="model.layers.{i}.",
)
