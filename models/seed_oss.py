"""Seed-OSS: Llama with biases on queries, keys and values, and dropout of what each branch adds."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs, Dropout
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import DropoutRate, HeadDim, Whole
from .base.parts import attention, gated_mlp, rms_norm
from .llama import LLAMA_NAMES, LlamaConfig, decoder


class SeedOssConfig(LlamaConfig):
    """List the fields of a Seed-OSS config.json.

    ``attention_bias``: on queries, keys and values; ``attention_out_bias``: on the product after attention.
    """

    # By default transformers ends at and pads with tokens that other vocabularies use.
    ADDED: ClassVar[Mapping[str, object]] = {"pad_token_id": None}

    num_key_value_heads: Whole = 8
    head_dim: HeadDim = 128
    max_position_embeddings: Whole = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False
    attention_dropout: DropoutRate = 0.1
    residual_dropout: DropoutRate = 0.1


class SeedOssBlock(nn.Module):
    """Compute a block of Seed-OSS.

    x = x + dropout(attention(attention_norm(x)))    * biases on queries, keys and values
    x = x + dropout(mlp(mlp_norm(x)))
    """

    def __init__(self, cfg: SeedOssConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        self.attention_norm = rms_norm(cfg, state)
        self.attention = attention(cfg, state, out_bias=cfg.attention_out_bias)
        self.mlp_norm, self.mlp = rms_norm(cfg, state), gated_mlp(cfg, state)
        self.dropout = Dropout(cfg.residual_dropout, state=state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", SeedOssConfig, decoder(SeedOssBlock), LLAMA_NAMES)
