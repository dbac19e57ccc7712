"""Phi 1, 1.5 and 2: GPT-NeoX with one norm for both branches, and a bias in the output layer too."""

from typing import ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs, Dropout, LayerNorm
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import NO, YES, ZERO, DropoutRate, Factor, Fixed, Share, Whole, key
from .base.parts import HeadNorm, attention, layer_norm, mlp
from .gpt_neox import GPTNeoXConfig
from .llama import LLAMA_NAMES, decoder

NAMES = LLAMA_NAMES.but(
    {
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "attention.out": "self_attn.dense",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    },
    norm="model.final_layernorm",
)


class PhiConfig(GPTNeoXConfig):
    """List the fields of a Phi config.json."""

    FIXED: ClassVar[Fixed] = {
        **dict.fromkeys(("attention_bias", "use_parallel_residual"), YES),
        "hidden_dropout": ZERO,
        "tie_word_embeddings": NO,
    }

    num_key_value_heads: Whole
    hidden_act: str = "gelu_new"
    rope_theta: Factor = key("rope_theta", default=10000.0)
    partial_rotary_factor: Share = key("partial_rotary_factor", default=0.5)
    qk_layernorm: bool = False
    resid_pdrop: DropoutRate = 0.0
    embd_pdrop: DropoutRate = 0.0


class PhiBlock(nn.Module):
    """Compute a block of Phi. Source: Gunasekar et al. 2023.

    y = attention_norm(x)                                 * one LayerNorm for both branches
    x = x + dropout(attention(y)) + dropout(mlp(y))       * side by side; biases; mlp: no gate, GELU
    """

    def __init__(self, cfg: PhiConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        norm = head_norm(cfg, state) if cfg.qk_layernorm else None
        self.attention_norm, self.attention = layer_norm(cfg, state), attention(cfg, state, qk_norm=norm)
        self.mlp, self.dropout = mlp(cfg, state), Dropout(cfg.resid_pdrop, state=state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        y_BSD = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.dropout(self.attention(y_BSD, inputs)) + self.dropout(self.mlp(y_BSD))
        return x_BSD


def head_norm(cfg: PhiConfig, state: ParallelState) -> HeadNorm:
    """Return what makes the LayerNorm of each head of queries and keys, with one weight for all."""
    return lambda heads: LayerNorm(cfg.head_dim, cfg.layer_norm_eps, heads=True, state=state)


PHI = Family(
    "phi",
    "PhiForCausalLM",
    PhiConfig,
    decoder(PhiBlock, make_norm=layer_norm, embedding_dropout="embd_pdrop", biased_head=True),
    NAMES,
)
