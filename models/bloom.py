"""Bloom: scores biased by distance in place of positions, a norm after the embedding, qkv by heads."""

from typing import Any, ClassVar, cast

from torch import Tensor

from ..layers import Alibi, alibi_slopes
from ..parallel_state import ParallelState
from .base.causal_lm import CausalLM
from .base.family import Family
from .base.keys import ABSENT, NO, DropoutRate, Epsilon, Fixed, Whole, key, names
from .base.names import Names, fused
from .base.parts import layer_norm, mlp
from .gpt2 import WholeHeadsConfig
from .llama import DropoutBlock

BLOOM_NAMES = Names(
    "transformer.h.{i}",
    {"embed": "transformer.word_embeddings", "embed_norm": "transformer.word_embeddings_layernorm"},
    {
        "attention_norm": "input_layernorm",
        "attention.qkv": fused("self_attention.query_key_value", "q k v", groups="num_attention_heads"),
        "attention.out": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    {"norm": "transformer.ln_f", "head": "lm_head"},
)


class BloomConfig(WholeHeadsConfig):
    """List the fields of a Bloom config.json.

    ``max_position_embeddings``: the length of its training, which Bloom's files call ``seq_length``; the
    weights do not depend on it.
    """

    FIXED: ClassVar[Fixed] = {
        "apply_residual_connection_post_layernorm": NO,
        "slow_but_exact": (False, True),  # the same numbers, summed in another order
        **dict.fromkeys(("intermediate_size", "n_inner"), ABSENT),  # 4 * hidden_size
        **dict.fromkeys(("skip_bias_add", "skip_bias_add_qkv", "bias_dropout_fusion"), (False, True)),
        **dict.fromkeys(("masked_softmax_fusion", "attention_softmax_in_fp32"), (False, True)),
    }
    READ: ClassVar[frozenset[str]] = names("offset_alibi")

    hidden_size: int = key("hidden_size", "n_embed", gt=0, le=2**20)
    num_hidden_layers: int = key("n_layer", "num_hidden_layers", gt=0, le=2**12)
    num_attention_heads: int = key("n_head", "num_attention_heads", gt=0, le=2**16)
    max_position_embeddings: Whole = key("seq_length", "max_position_embeddings", default=2048)
    layer_norm_eps: Epsilon = key("layer_norm_epsilon", default=1e-5)
    tie_word_embeddings: bool = True
    hidden_dropout: DropoutRate = 0.0
    attention_dropout: DropoutRate = 0.0

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        hidden = fields.get("hidden_size")
        inner = 4 * hidden if isinstance(hidden, int) else None
        return super().prepare({**fields, "intermediate_size": inner}, where)

    @property
    def hidden_act(self) -> str:
        return "gelu_new"


class BloomBlock(DropoutBlock):
    """Compute a block of Bloom. Source: Scao et al. 2022.

    x = x + dropout(attention(attention_norm(x)))    * scores biased by distance; biases, LayerNorm
    x = x + dropout(mlp(mlp_norm(x)))                * no gate; GELU
    """

    make_norm, make_mlp, dropout_field = staticmethod(layer_norm), staticmethod(mlp), "hidden_dropout"

    def __init__(self, cfg: BloomConfig, number: int, state: ParallelState) -> None:
        alibi = Alibi(alibi_slopes(cfg.num_attention_heads))
        super().__init__(cfg, number, state, qkv_bias=True, out_bias=True, alibi=alibi)


class Bloom(CausalLM):
    """Compute Bloom, or the stage that this pipeline rank holds: a norm after the embedding."""

    config: BloomConfig
    Block = BloomBlock
    make_norm = staticmethod(layer_norm)

    def add_embedding_modules(self) -> None:
        self.embed_norm = layer_norm(self.config, self.state)

    def embed_hook(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        return cast(Tensor, self.embed_norm(x_BSD))


BLOOM = Family("bloom", "BloomForCausalLM", BloomConfig, Bloom, BLOOM_NAMES, optional_prefix="transformer.")
