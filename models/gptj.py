"""GPT-J: parallel branches with one norm, rotated pairs of neighbours, an output layer with a bias."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..layers import RotaryEmbedding
from .base.family import Family
from .base.keys import NO, YES, Count, DropoutRate, Fixed, key
from .base.names import Names
from .base.parts import layer_norm
from .gpt2 import GPT2Config
from .llama import decoder
from .phi import PhiBlock

NAMES = Names(
    "transformer.h.{i}",
    {"embed": "transformer.wte"},
    {
        "attention_norm": "ln_1",
        "attention.qkv.q": "attn.q_proj",
        "attention.qkv.k": "attn.k_proj",
        "attention.qkv.v": "attn.v_proj",
        "attention.out": "attn.out_proj",
        "mlp.up": "mlp.fc_in",
        "mlp.down": "mlp.fc_out",
    },
    {"norm": "transformer.ln_f", "head": "lm_head"},
)


class GPTJConfig(GPT2Config):
    """List the fields of a GPT-J config.json."""

    FIXED: ClassVar[Fixed] = {"rotary": YES, "tie_word_embeddings": NO}

    max_position_embeddings: Count = key("n_positions", "max_position_embeddings", default=2048)
    rotary_dim: int = Field(default=64, gt=0, multiple_of=2)
    tie_word_embeddings: bool = False
    resid_pdrop: DropoutRate = 0.0
    embd_pdrop: DropoutRate = 0.0
    attention_dropout: DropoutRate = 0.0

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        width, stated = self.head_dim, raw.get("rotary_dim", self.rotary_dim)
        self.require(self.rotary_dim <= width, where, "rotary_dim", f"at most the width of a head, {width}")
        expected = "how many numbers of a head are rotated"
        self.require(stated is not None, where, "rotary_dim", expected, None)

    def rotation(self, number: int) -> str:
        return "all"

    def rotations(self) -> dict[str, RotaryEmbedding]:
        return {"all": RotaryEmbedding(self.rotary_dim, 10000.0, interleaved=True)}


class GPTJBlock(PhiBlock):
    """Compute a block of GPT-J. Source: Wang and Komatsuzaki 2021.

    y = attention_norm(x)                                 * one LayerNorm for both branches
    x = x + dropout(attention(y)) + dropout(mlp(y))       * side by side; biases of mlp alone; GELU
    """


GPTJ_FAMILY = Family(
    "gptj",
    "GPTJForCausalLM",
    GPTJConfig,
    decoder(GPTJBlock, make_norm=layer_norm, embedding_dropout="embd_pdrop", biased_head=True),
    NAMES,
    ignorable=("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
)
