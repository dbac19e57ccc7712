"""GPT-NeoX and Pythia: parallel branches with two norms, partly rotated heads, biases, qkv by heads. GPT-J
before them: one norm, rotated pairs of neighbours, an output layer with a bias.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs, Dropout, LayerNorm, RotaryEmbedding
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import ABSENT, NO, YES, Count, DropoutRate, Epsilon, Factor, Fixed, Share, key
from .base.names import Names, fused
from .base.parts import HeadNorm, attention, layer_norm, mlp
from .bloom import BLOOM_NAMES
from .gpt2 import GPT2Config
from .llama import LlamaBlock, PartialRotaryConfig, decoder

NAMES = Names(
    "gpt_neox.layers.{i}",
    {"embed": "gpt_neox.embed_in"},
    {
        **BLOOM_NAMES.block,
        "attention.qkv": fused("attention.query_key_value", "q k v", groups="num_attention_heads"),
        "attention.out": "attention.dense",
    },
    {"norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
)


class GPTNeoXConfig(PartialRotaryConfig):
    """List the fields of a GPT-NeoX config.json."""

    HEADS_FILL: ClassVar[bool] = True
    FIXED: ClassVar[Fixed] = {
        **dict.fromkeys(("num_key_value_heads", "rms_norm_eps"), ABSENT),  # one for each head; layer_norm_eps
        "mlp_bias": YES,
    }

    hidden_act: str = "gelu"
    layer_norm_eps: Epsilon = 1e-5
    rope_theta: Factor = key("rotary_emb_base", default=10000.0)
    partial_rotary_factor: Share = key("rotary_pct", default=0.25)
    attention_bias: bool = True
    use_parallel_residual: bool = True
    hidden_dropout: DropoutRate = 0.0


class GPTNeoXBlock(LlamaBlock):
    """Compute a block of GPT-NeoX. Source: Black et al. 2022.

    x = x + dropout(attention(attention_norm(x)))      * LayerNorm; biases
          + dropout(mlp(mlp_norm(x)))                  * side by side, or of the sum; biases, no gate, GELU
    """

    make_norm, make_mlp = staticmethod(layer_norm), staticmethod(mlp)

    def __init__(self, cfg: GPTNeoXConfig, number: int, state: ParallelState) -> None:
        super().__init__(cfg, number, state)
        self.dropout, self.parallel = Dropout(cfg.hidden_dropout, state=state), cfg.use_parallel_residual

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        before_BSD = x_BSD
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(before_BSD if self.parallel else x_BSD)))
        return x_BSD


GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    GPTNeoXConfig,
    decoder(GPTNeoXBlock, make_norm=layer_norm, embedding_dropout="hidden_dropout"),
    NAMES,
    ignorable=("gpt_neox.layers.{i}.attention.bias",),
    tied_head="embed_out.weight",
)


GPTJ_NAMES = Names(
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
        width, rotary_dim = self.head_dim, raw.get("rotary_dim", self.rotary_dim)
        self.require(self.rotary_dim <= width, where, "rotary_dim", f"at most the width of a head, {width}")
        expected = "how many numbers of a head are rotated"
        self.require(rotary_dim is not None, where, "rotary_dim", expected, None)

    def rotation(self, number: int) -> str:
        return "all"

    def rotations(self) -> dict[str, RotaryEmbedding]:
        return {"all": RotaryEmbedding(self.rotary_dim, 10000.0, interleaved=True)}


def phi_norm(cfg: Any, state: ParallelState) -> HeadNorm:
    """Return what makes the LayerNorm of each head of queries and keys, with one weight for all."""
    return lambda heads: LayerNorm(cfg.head_dim, cfg.layer_norm_eps, heads=True, state=state)


class GPTJBlock(nn.Module):
    """Compute a block of GPT-J or Phi. Source: Wang and Komatsuzaki 2021; Gunasekar et al. 2023.

    y = attention_norm(x)                                 * one LayerNorm for both branches
    x = x + dropout(attention(y)) + dropout(mlp(y))       * side by side; biases (GPT-J: of mlp alone); GELU
    """

    def __init__(self, cfg: Any, number: int, state: ParallelState) -> None:
        super().__init__()
        norm = phi_norm(cfg, state) if getattr(cfg, "qk_layernorm", False) else None
        self.attention_norm = layer_norm(cfg, state)
        self.attention = attention(cfg, number, state, qk_norm=norm)
        self.mlp, self.dropout = mlp(cfg, state), Dropout(cfg.resid_pdrop, state=state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        y_BSD = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.dropout(self.attention(y_BSD, inputs)) + self.dropout(self.mlp(y_BSD))
        return x_BSD


GPTJ_FAMILY = Family(
    "gptj",
    "GPTJForCausalLM",
    GPTJConfig,
    decoder(GPTJBlock, make_norm=layer_norm, embedding_dropout="embd_pdrop", biased_head=True),
    GPTJ_NAMES,
    ignorable=("transformer.h.{i}.attn.bias",),
)
