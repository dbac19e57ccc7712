"""GLM-4 (0414), with norms behind branches, and GLM-4.5, with experts behind a first few blocks."""

from typing import ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import NO, Epsilon, Experts, Fixed, HeadDim, Share, Whole, Width
from .base.parts import attention, gated_mlp, head_rms_norm, rms_norm
from .expert_block import GROUPED_EXPERTS, MultiTokenConfig, grouped_mixture
from .llama import LLAMA_NAMES, LlamaBlock, PartialRotaryConfig, decoder
from .phi import FUSED_GATE_UP

GLM4_NAMES = LLAMA_NAMES.but(
    {
        "after_attention": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **FUSED_GATE_UP,
        "after_mlp": "post_mlp_layernorm",
    }
)


class Glm4Config(PartialRotaryConfig):
    """List the fields of a GLM-4 config.json. ``attention_bias``: on queries, keys and values."""

    INTERLEAVED: ClassVar[bool] = True
    FIXED: ClassVar[Fixed] = {"mlp_bias": NO}
    UNPADDED: ClassVar[bool] = True

    num_key_value_heads: Whole = 2
    head_dim: HeadDim = 128
    max_position_embeddings: Whole = 131072
    rms_norm_eps: Epsilon = 1.5625e-7
    attention_bias: bool = True
    partial_rotary_factor: Share = 0.5


class Glm4Block(nn.Module):
    """Compute a block of GLM-4.

    x = x + after_attention(attention(attention_norm(x)))    * norms behind branches too; biases on q, k, v
    x = x + after_mlp(mlp(mlp_norm(x)))
    """

    def __init__(self, cfg: Glm4Config, number: int, state: ParallelState) -> None:
        super().__init__()
        self.attention_norm = rms_norm(cfg, state)
        self.attention = attention(cfg, number, state, out_bias=False)
        self.after_attention, self.mlp_norm = rms_norm(cfg, state), rms_norm(cfg, state)
        self.mlp, self.after_mlp = gated_mlp(cfg, state), rms_norm(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.after_attention(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.after_mlp(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


GLM4 = Family("glm4", "Glm4ForCausalLM", Glm4Config, decoder(Glm4Block), GLM4_NAMES)


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


class Glm4MoeBlock(LlamaBlock):
    """Compute a block of GLM-4.5 (Zeng et al. 2025).

    x = x + attention(attention_norm(x))    * biases on q, k, v; heads partly rotated, some normalised
    x = x + mlp(mlp_norm(x))                * after the first blocks: experts and a net for all tokens
    """

    make_experts = staticmethod(grouped_mixture)

    def __init__(self, cfg: Glm4MoeConfig, number: int, state: ParallelState) -> None:
        norms = head_rms_norm(cfg, state) if cfg.use_qk_norm else None
        super().__init__(cfg, number, state, out_bias=False, qk_norm=norms)


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    Glm4MoeConfig,
    decoder(Glm4MoeBlock),
    LLAMA_NAMES.but(GROUPED_EXPERTS),
    further="model.layers.{i}.",
)
