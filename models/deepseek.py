"""DeepSeek-V2 and V3: multi-head latent attention, and experts in groups beside shared ones."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from ..layers import MultiHeadLatentAttention, yarn_scale
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import NO, Experts, Fixed, HeadDim, Whole, Width, key, names
from .base.parts import RouterOptions
from .expert_block import GROUPED_EXPERTS, GroupedExpertsConfig, MultiTokenConfig, grouped_mixture
from .llama import LLAMA_NAMES, LlamaBlock, decoder


class LatentAttentionConfig(GroupedExpertsConfig):
    """List the fields of a DeepSeek config.json with multi-head latent attention.

    ``head_dim`` is what DeepSeek calls ``qk_rope_head_dim``: as many numbers of a head are rotated.
    """

    FIXED: ClassVar[Fixed] = {"moe_layer_freq": (1,)}
    READ: ClassVar[frozenset[str]] = names("qk_head_dim")

    head_dim: HeadDim = key("qk_rope_head_dim", "head_dim", default=64)
    q_lora_rank: int | None = Field(default=1536, gt=0, le=2**20)  # null: none
    kv_lora_rank: int = Field(default=512, gt=0, le=2**20)
    qk_nope_head_dim: int = Field(default=128, gt=0, le=2**16)
    v_head_dim: int = Field(default=128, gt=0, le=2**16)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        heads, width = self.num_attention_heads, self.query_dim
        expected = f"num_attention_heads={heads}: latent attention has keys for each head"
        self.require(self.num_key_value_heads == heads, where, "num_key_value_heads", expected)
        expected = f"at most {width}, the width of a query head"
        self.require(self.v_head_dim <= width, where, "v_head_dim", expected)
        qk_head_dim = raw.get("qk_head_dim", width)
        expected = f"{width}, as qk_nope_head_dim and qk_rope_head_dim add up to"
        self.require(qk_head_dim == width, where, "qk_head_dim", expected, qk_head_dim)

    @property
    def query_dim(self) -> int:
        """Return the width of a head of queries and keys."""
        return self.qk_nope_head_dim + self.head_dim

    @property
    def attention_scale(self) -> float:
        """Return the factor of the scores. Yarn's scale by ``mscale_all_dim`` is in it twice."""
        scaling = self.rope_scaling
        stretch = 1.0
        if scaling is not None and scaling.mscale_all_dim:
            stretch = yarn_scale(scaling.factor, scaling.mscale_all_dim)
        return float(self.query_dim**-0.5 * stretch * stretch)


class DeepseekV2Config(LatentAttentionConfig):
    """List the fields of a DeepSeek-V2 config.json.

    ``topk_method``: ``greedy``, or ``group_limited_greedy``, where a token's experts are in its best groups.
    """

    INTERLEAVED: ClassVar[bool] = True
    FIXED: ClassVar[Fixed] = {"norm_topk_prob": NO, "scoring_func": ("softmax",)}

    num_local_experts: Experts = key("n_routed_experts", default=64)
    moe_intermediate_size: Width = 1407
    n_shared_experts: int = Field(default=2, gt=0, le=2**10)
    first_k_dense_replace: int = Field(default=0, ge=0)
    n_group: Whole | None = None
    topk_group: Whole | None = None
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"

    @property
    def groups(self) -> tuple[int, int]:
        return super().groups if self.topk_method == "group_limited_greedy" else (1, 1)

    @property
    def routing(self) -> RouterOptions:
        """Return how the router chooses: by softmax scores, a token's experts in its best groups."""
        (groups, chosen), scale = self.groups, self.routed_scaling_factor
        return RouterOptions(normalize=False, scale=scale, groups=groups, groups_kept=chosen)


def latent_attention(cfg: Any, number: int, state: ParallelState) -> MultiHeadLatentAttention:
    """Make the attention of a block."""
    return MultiHeadLatentAttention(
        cfg.hidden_size,
        heads=cfg.num_attention_heads,
        q_lora_rank=cfg.q_lora_rank,
        kv_lora_rank=cfg.kv_lora_rank,
        qk_nope_head_dim=cfg.qk_nope_head_dim,
        qk_rope_head_dim=cfg.head_dim,
        v_head_dim=cfg.v_head_dim,
        bias=cfg.attention_bias,
        scale=cfg.attention_scale,
        dropout=cfg.attention_dropout,
        initial=cfg.initial,
        state=state,
    )


class DeepseekBlock(LlamaBlock):
    """Compute a block of DeepSeek-V2 or V3 (DeepSeek-AI 2024).

    x = x + attention(attention_norm(x))    * multi-head latent attention
    x = x + mlp(mlp_norm(x))                * after the first blocks: experts and a net for all tokens
    """

    make_attention = staticmethod(latent_attention)
    make_experts = staticmethod(grouped_mixture)


NAMES = LLAMA_NAMES.but(
    {
        "attention.q": "self_attn.q_proj",
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.q_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
        **GROUPED_EXPERTS,
    }
)

DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", DeepseekV2Config, decoder(DeepseekBlock), NAMES)


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


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    DeepseekV3Config,
    decoder(DeepseekBlock),
    NAMES,
    further="model.layers.{i}.",
)
