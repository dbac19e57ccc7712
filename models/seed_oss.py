"""Seed-OSS: Llama with biases on queries, keys and values, and dropout of what each branch adds."""

from typing import ClassVar

from .base.family import Family
from .base.keys import DropoutRate, HeadDim, Whole
from .llama import LLAMA_NAMES, LlamaConfig, decoder
from .phi import Phi3Block


class SeedOssConfig(LlamaConfig):
    """List the fields of a Seed-OSS config.json; its blocks are of Phi 3's form.

    ``attention_bias``: on queries, keys and values; ``attention_out_bias``: on the product after attention.
    """

    UNPADDED: ClassVar[bool] = True

    num_key_value_heads: Whole = 8
    head_dim: HeadDim = 128
    max_position_embeddings: Whole = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False
    attention_dropout: DropoutRate = 0.1
    residual_dropout: DropoutRate = 0.1


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", SeedOssConfig, decoder(Phi3Block), LLAMA_NAMES)
