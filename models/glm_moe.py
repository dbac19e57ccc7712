"""GLM-4.5: Llama with experts behind a first few blocks, sigmoid scores and biases that balance them."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.fields import Epsilon, Experts, Fixed, Share, Whole, Width
from .base.parts import attention, gated_mlp, head_rms_norm, rms_norm
from .grouped_experts import GROUPED_EXPERTS, corrected_router, grouped_experts
from .llama import NAMES, RotaryDecoder
from .multi_token import MultiTokenConfig
from .partial_rotary import PartialRotaryConfig


class Glm4MoeConfig(PartialRotaryConfig, MultiTokenConfig):
    """List the fields of a GLM-4.5 config.json."""

    FIXED: ClassVar[Fixed] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}

    num_key_value_heads: Whole = 8
    num_local_experts: Experts = 128
    num_experts_per_tok: Whole = 8
    moe_intermediate_size: Width = 1408
    norm_topk_prob: bool = True
    use_qk_norm: bool = False
    partial_rotary_factor: Share = 0.5
    max_position_embeddings: Whole = 131072
    rms_norm_eps: Epsilon = 1e-5


class Glm4MoeBlock(nn.Module):
    """Compute a block of GLM-4.5 (Zeng et al. 2025).

    x = x + attention(attention_norm(x))    * biases on q, k, v; heads partly rotated, some normalised
    x = x + mlp(mlp_norm(x))                * after the first blocks: experts and a net for all tokens
    """

    def __init__(self, cfg: Glm4MoeConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        norms = head_rms_norm(cfg, state) if cfg.use_qk_norm else None
        self.attention_norm = rms_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=cfg.attention_bias, qk_norm=norms)
        self.mlp_norm = rms_norm(cfg, state)
        if cfg.has_experts(number):
            self.mlp: nn.Module = grouped_experts(cfg, corrected_router(cfg, state), state)
        else:
            self.mlp = gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class Glm4Moe(RotaryDecoder):
    """Compute GLM-4.5, or the stage that this pipeline rank holds."""

    config: Glm4MoeConfig
    Block = Glm4MoeBlock


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    Glm4MoeConfig,
    Glm4Moe,
    NAMES.but(GROUPED_EXPERTS),
    further="model.layers.{i}.",
)
