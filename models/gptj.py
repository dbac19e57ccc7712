"""GPT-J: parallel branches with one norm, rotated pairs of neighbours, an output layer with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs, Dropout, RotaryEmbedding
from ..parallel_state import BadInput, ParallelState
from .base.causal_lm import CausalLM
from .base.family import Family
from .base.names import Names
from .base.parts import attention, layer_norm, mlp
from .gpt2 import GPT2Config

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
    """List the fields of a GPT-J config.json that the model computes with."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "scale_attn_weights": (True,),
        "rotary": (True,),
        "tie_word_embeddings": (False,),
    }

    max_position_embeddings: int = Field(default=2048, gt=0, le=2**24)
    rotary_dim: int = Field(default=64, gt=0, multiple_of=2)
    tie_word_embeddings: bool = False
    resid_pdrop: float = Field(default=0.0, ge=0, lt=1)
    embd_pdrop: float = Field(default=0.0, ge=0, lt=1)
    attn_pdrop: float = Field(default=0.0, ge=0, lt=1)

    def check(self, where: str) -> None:
        super().check(where)
        if self.rotary_dim > self.head_dim:
            expected = f"at most the width of a head, {self.head_dim}"
            raise BadInput(where, "rotary_dim", expected=expected, found=self.rotary_dim)

    def check_stated(self, raw: Mapping[str, Any], where: str) -> None:
        if raw.get("rotary_dim", self.rotary_dim) is None:
            raise BadInput(where, "rotary_dim", expected="how many numbers of a head are rotated", found=None)

    def to_hf(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_hf().items() if key not in self.HARMLESS}


class GPTJBlock(nn.Module):
    """Compute a block of GPT-J. Source: Wang and Komatsuzaki 2021.

    y = attention_norm(x)                                 * one LayerNorm for both branches
    x = x + dropout(attention(y)) + dropout(mlp(y))       * side by side; mlp: biases, no gate, GELU
    """

    def __init__(self, cfg: GPTJConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        self.attention_norm = layer_norm(cfg, state)
        self.attention = attention(cfg, state, dropout=cfg.attn_pdrop)
        self.mlp, self.dropout = mlp(cfg, state), Dropout(cfg.resid_pdrop, state=state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        y_BSD = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.dropout(self.attention(y_BSD, inputs)) + self.dropout(self.mlp(y_BSD))
        return x_BSD


class GPTJ(CausalLM):
    """Compute GPT-J, or the stage that this pipeline rank holds."""

    config: GPTJConfig
    Block = GPTJBlock
    make_norm = staticmethod(layer_norm)
    embedding_dropout = "embd_pdrop"
    biased_head = True

    def make_rotary(self) -> Mapping[str, RotaryEmbedding]:
        return {"all": RotaryEmbedding(self.config.rotary_dim, 10000.0, interleaved=True)}


GPTJ_FAMILY = Family(
    "gptj",
    "GPTJForCausalLM",
    GPTJConfig,
    GPTJ,
    NAMES,
    ignorable=("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
)
