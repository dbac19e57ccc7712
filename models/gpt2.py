"""GPT-2.    B batch  S sequence  D hidden"""

from collections.abc import Mapping
from math import sqrt
from typing import Any, ClassVar

from torch import Tensor

from ..layers import PositionEmbedding, default_positions
from ..parallel_state import Normal, ParallelState
from .base.causal_lm import CausalLM
from .base.config import ModelConfig
from .base.family import Family
from .base.keys import NO, YES, Count, DropoutRate, Epsilon, Fixed, Width, key
from .base.names import Names, fused, transposed
from .base.parts import layer_norm, mlp
from .llama import DropoutBlock


class WholeHeadsConfig(ModelConfig):
    """State that heads together are as wide as the hidden states."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        heads, key = self.num_attention_heads, self.spelled("num_attention_heads")
        self.require(self.hidden_size % heads == 0, where, "hidden_size", f"a multiple of {key}={heads}")


class GPT2Config(WholeHeadsConfig):
    """List the fields of a GPT-2 config.json."""

    FIXED: ClassVar[Fixed] = {
        "scale_attn_weights": YES,
        "scale_attn_by_inverse_layer_idx": NO,
        "reorder_and_upcast_attn": (False, True),  # the same numbers, in fp32
    }

    hidden_size: int = key("n_embd", "hidden_size", gt=0, le=2**20)
    intermediate_size: Width = key("n_inner")
    num_hidden_layers: int = key("n_layer", "num_hidden_layers", gt=0, le=2**12)
    num_attention_heads: int = key("n_head", "num_attention_heads", gt=0, le=2**16)
    max_position_embeddings: Count = key("n_positions", "max_position_embeddings")
    hidden_act: str = key("activation_function", default="gelu_new")
    layer_norm_eps: Epsilon = key("layer_norm_epsilon", default=1e-5)
    tie_word_embeddings: bool = True
    resid_pdrop: DropoutRate = 0.1
    embd_pdrop: DropoutRate = 0.1
    attention_dropout: DropoutRate = key("attn_pdrop", default=0.1)

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        if fields.get("intermediate_size") is None and isinstance(fields.get("hidden_size"), int):
            fields["intermediate_size"] = 4 * fields["hidden_size"]
        return super().prepare(fields, where)


NAMES = Names(
    "transformer.h.{i}",
    {"embed": "transformer.wte", "position": "transformer.wpe"},
    {
        "attention_norm": "ln_1",
        "attention.qkv": fused("attn.c_attn", "q k v", transpose=True),
        "attention.out": transposed("attn.c_proj"),
        "mlp_norm": "ln_2",
        "mlp.up": transposed("mlp.c_fc"),
        "mlp.down": transposed("mlp.c_proj"),
    },
    {"norm": "transformer.ln_f", "head": "lm_head"},
)


def residual_initial(cfg: GPT2Config) -> Normal:
    """Return how layers start that add to the residual stream: smaller, by their number (section 2.3)."""
    return Normal(cfg.initializer_range / sqrt(2 * cfg.num_hidden_layers))


class GPT2Block(DropoutBlock):
    """Compute a block of GPT-2. Source: Radford et al. 2019.

    x = x + dropout(attention(attention_norm(x)))    * biases, no rotation; LayerNorm
    x = x + dropout(mlp(mlp_norm(x)))                * no gate; GELU
    """

    make_norm, dropout_field = staticmethod(layer_norm), "resid_pdrop"
    make_mlp = staticmethod(lambda cfg, state: mlp(cfg, state, out_initial=residual_initial(cfg)))

    def __init__(self, cfg: GPT2Config, number: int, state: ParallelState) -> None:
        small = residual_initial(cfg)
        super().__init__(cfg, number, state, qkv_bias=True, out_bias=True, out_initial=small)


class GPT2(CausalLM):
    """Compute GPT-2, or the stage that this pipeline rank holds: learned positions, then dropout."""

    config: GPT2Config
    Block = GPT2Block
    make_norm = staticmethod(layer_norm)
    embedding_dropout = "embd_pdrop"

    def add_embedding_modules(self) -> None:
        rows, width = self.config.max_position_embeddings, self.config.hidden_size
        self.position = PositionEmbedding(rows, width, initial=self.config.initial, state=self.state)
        super().add_embedding_modules()

    def embed_hook(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            positions = default_positions(x_BSD, self.state, embedded=True)
        return super().embed_hook(self.position(x_BSD, positions), positions)


GPT2_FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    GPT2Config,
    GPT2,
    NAMES,
    ignorable=("transformer.h.{i}.attn.bias",),
    optional_prefix="transformer.",
)
