"""Qwen3-Next: three blocks with a gated delta net to one with gated attention, and experts in each."""

from __future__ import annotations

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.fields import Experts, Whole, Width
from .base.names import fused
from .base.parts import gated_mlp
from .delta_net import LINEAR, NAMES, DeltaNetConfig, delta_net, gated_attention, hybrid_norm
from .llama import RotaryDecoder
from .qwen2_moe import SHARED_MIXTURE, SharedExpertConfig, shared_mixture


class Qwen3NextConfig(DeltaNetConfig, SharedExpertConfig):
    """List the fields of a Qwen3-Next config.json; blocks of ``mlp_only_layers`` have one net.

    Published checkpoints hold one block more, under ``mtp``, which predicts further tokens; it is left out,
    as transformers does.
    """

    num_key_value_heads: Whole = 2
    num_local_experts: Experts = 512
    num_experts_per_tok: Whole = 10
    moe_intermediate_size: Width = 512
    shared_expert_intermediate_size: Width = 512
    norm_topk_prob: bool = True

    @property
    def further_blocks(self) -> int:
        return 1


class Qwen3NextBlock(nn.Module):
    """Compute a block of Qwen3-Next. Its mixer has other names than attention, since files tell them apart.

    x = x + mixer(mixer_norm(x))            * gated delta net; norms scale by 1 + weight
    x = x + attention(attention_norm(x))    * in every fourth block: gated, heads normalised, partly rotated
    x = x + mlp(mlp_norm(x))                * experts and a gated net for all tokens
    """

    def __init__(self, cfg: Qwen3NextConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        self.recurrent = cfg.layer_types[number] == LINEAR
        if self.recurrent:
            self.mixer_norm, self.mixer = hybrid_norm(cfg, state), delta_net(cfg, state)
        else:
            self.attention_norm, self.attention = hybrid_norm(cfg, state), gated_attention(cfg, state)
        self.mlp_norm = hybrid_norm(cfg, state)
        self.mlp = shared_mixture(cfg, state) if cfg.has_experts(number) else gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        if self.recurrent:
            x_BSD = x_BSD + self.mixer(self.mixer_norm(x_BSD), inputs)
        else:
            x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class Qwen3Next(RotaryDecoder):
    """Compute Qwen3-Next, or the stage that this pipeline rank holds."""

    config: Qwen3NextConfig
    Block = Qwen3NextBlock
    make_norm = staticmethod(hybrid_norm)


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    Qwen3NextConfig,
    Qwen3Next,
    NAMES.but(
        {
            # A key head's queries and keys come together with its values, and with their gates.
            "mixer.qkvz": fused("linear_attn.in_proj_qkvz", "q k v z", groups="linear_num_key_heads"),
            "mixer.ba": fused("linear_attn.in_proj_ba", "b a", groups="linear_num_key_heads"),
            **SHARED_MIXTURE,
        }
    ),
    further="mtp.",
)
