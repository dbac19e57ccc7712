"""Qwen 2, 2.5 and 3: Llama with biases on queries, keys and values (2), or with normalised heads (3); with
experts too, and in 1.5 and 2 one more net for all tokens, behind a gate.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..layers import GatedShared, MoE
from ..parallel_state import BadInput, ParallelState
from .base.family import Family
from .base.keys import MOST_BLOCKS, NO, YES, Experts, Fixed, HeadDim, Whole, Width, key
from .base.names import Entry
from .base.parts import gated_mlp, head_rms_norm, mixture
from .expert_block import EXPERTS, NarrowExpertsConfig
from .llama import LLAMA_NAMES, LlamaBlock, NoWindowsConfig, decoder

#: Other families' switches for the norms of queries and keys, which Qwen 3 always has.
HEAD_NORMS = dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm"), YES)


class Qwen2Config(NoWindowsConfig):
    """List the fields of a Qwen 2 or 2.5 config.json."""

    # Biases are on queries, keys and values.
    FIXED: ClassVar[Fixed] = {"attention_bias": YES, "qkv_bias": YES, "mlp_bias": NO}

    num_key_value_heads: Whole = 32
    max_position_embeddings: Whole = 32768


class Qwen3Config(NoWindowsConfig):
    """List the fields of a Qwen 3 config.json."""

    FIXED: ClassVar[Fixed] = {**HEAD_NORMS, "mlp_bias": NO}

    num_key_value_heads: Whole = 32
    head_dim: HeadDim = 128
    max_position_embeddings: Whole = 32768

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        if fields.get("head_dim") is None:  # also where it is null: not a share of the hidden size
            fields["head_dim"] = cls.default("head_dim")
        return super().prepare(fields, where)


class Qwen3MoeConfig(NoWindowsConfig, NarrowExpertsConfig):
    """List the fields of a Qwen 3 config.json with experts; blocks of ``mlp_only_layers`` have none."""

    FIXED: ClassVar[Fixed] = {**HEAD_NORMS, "scoring_func": ("softmax",)}

    num_key_value_heads: Whole = 4
    #: transformers 4 writes the one, transformers 5 the other.
    num_local_experts: Experts = key("num_experts", "num_local_experts", default=128)
    num_experts_per_tok: Whole = 8
    moe_intermediate_size: Width = 768
    decoder_sparse_step: Whole = 1
    mlp_only_layers: tuple[Annotated[int, Field(ge=0, lt=MOST_BLOCKS)], ...] = ()
    max_position_embeddings: Whole = 32768

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        blocks, step = self.num_hidden_layers, self.decoder_sparse_step
        last = max(self.mlp_only_layers, default=0)
        self.require(last < blocks, where, "mlp_only_layers", f"numbers of the {blocks} blocks, from 0", last)
        if not self.blocks_with_experts:
            sparse = f"decoder_sparse_step={step} of {blocks} blocks"
            raise BadInput(where, "mlp_only_layers", expected="a block with experts", found=sparse)

    def has_experts(self, number: int) -> bool:
        return number not in self.mlp_only_layers and (number + 1) % self.decoder_sparse_step == 0

    def to_hf(self) -> dict[str, Any]:
        experts = {key: self.num_local_experts for key in self.KEYS["num_local_experts"]}
        return {**super().to_hf(), **experts}


class SharedExpertConfig(Qwen3MoeConfig):
    """List the fields of Qwen's experts, and the width of the net for all tokens beside them."""

    num_local_experts: Experts = key("num_experts")
    shared_expert_intermediate_size: Width = 5632

    @property
    def tensor_units(self) -> dict[str, int]:
        shared = self.shared_expert_intermediate_size
        return {**super().tensor_units, "shared_expert_intermediate_size": shared}


class Qwen2MoeConfig(SharedExpertConfig):
    """List the fields of a Qwen 2 config.json with experts; blocks of ``mlp_only_layers`` have none."""

    FIXED: ClassVar[Fixed] = {
        **dict.fromkeys(HEAD_NORMS, NO),
        "attention_bias": YES,  # on queries, keys and values: qkv_bias says it
    }

    num_key_value_heads: Whole = 16
    num_local_experts: Experts = 60
    num_experts_per_tok: Whole = 4
    moe_intermediate_size: Width = 1408
    qkv_bias: bool = True


def qwen_mixture(cfg: Any, state: ParallelState) -> MoE:
    """Make the experts of a block and, if the config has one, the net for all tokens behind its gate."""
    shared = None
    if isinstance(cfg, SharedExpertConfig):
        net = gated_mlp(cfg, state, cfg.shared_expert_intermediate_size, entered=True)
        shared = GatedShared(cfg.hidden_size, net, initial=cfg.initial, state=state)
    return mixture(cfg, state, cfg.moe_intermediate_size, shared=shared, normalize=cfg.norm_topk_prob)


class QwenBlock(LlamaBlock):
    """Compute a block of Qwen 1.5, 2, 2.5 or 3.

    x = x + attention(attention_norm(x))    * 2: biases on queries, keys and values; 3: heads normalised
    x = x + mlp(mlp_norm(x))                * or experts, before 3 beside a gated net; in some blocks one net
    """

    make_experts = staticmethod(qwen_mixture)

    def __init__(self, cfg: Any, number: int, state: ParallelState) -> None:
        early = isinstance(cfg, Qwen2Config | SharedExpertConfig)
        bias, norms = getattr(cfg, "qkv_bias", early or cfg.attention_bias), head_rms_norm(cfg, state)
        super().__init__(cfg, number, state, qkv_bias=bias, qk_norm=None if early else norms)


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", Qwen2Config, decoder(QwenBlock), LLAMA_NAMES)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", Qwen3Config, decoder(QwenBlock), LLAMA_NAMES)


#: Ours -> Hugging Face's, of the experts and the net beside them.
SHARED_MIXTURE: dict[str, Entry] = {
    **EXPERTS,
    "mlp.shared.gate": "mlp.shared_expert_gate.weight",
    "mlp.shared.net.gate_up.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.net.gate_up.up": "mlp.shared_expert.up_proj",
    "mlp.shared.net.down": "mlp.shared_expert.down_proj",
}

QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", Qwen3MoeConfig, decoder(QwenBlock), LLAMA_NAMES.but(EXPERTS)
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    Qwen2MoeConfig,
    decoder(QwenBlock),
    LLAMA_NAMES.but(SHARED_MIXTURE),
)
