"""Falcon: parallel branches over few key/value heads, rotated; the first ones (RW) biased by distance."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from ..layers import Alibi, AttentionInputs, RotaryEmbedding, alibi_slopes
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import ABSENT, NO, ZERO, Epsilon, Fixed, Whole, Width, key
from .base.names import fused
from .base.parts import layer_norm, mlp
from .bloom import BLOOM_NAMES
from .llama import LlamaBlock, LlamaConfig, decoder

NAMES = BLOOM_NAMES.but(
    {
        "attention_norm": "{config.attention_norm}",
        "attention.qkv": fused("self_attention.query_key_value", "q k v", groups="num_key_value_heads"),
        "mlp_norm": "{config.mlp_norm}",
    }
)


class FalconConfig(LlamaConfig):
    """List the fields of a Falcon config.json.

    ``num_key_value_heads``: the heads that there are, 1 with ``multi_query``, whatever a file says.
    """

    HEADS_FILL: ClassVar[bool] = True
    FIXED: ClassVar[Fixed] = {
        **dict.fromkeys(("attention_bias", "mlp_bias", "rms_norm_eps"), ABSENT),  # bias, layer_norm_epsilon
        **dict.fromkeys(("attention_dropout", "hidden_dropout"), ZERO),
        "apply_residual_connection_post_layernorm": NO,
        "n_embed": ABSENT,  # hidden_size
    }

    num_key_value_heads: Whole = key("num_kv_heads")
    intermediate_size: Width = key("ffn_hidden_size")
    hidden_act: str = key("activation", default="gelu")
    layer_norm_eps: Epsilon = key("layer_norm_epsilon", default=1e-5)
    tie_word_embeddings: bool = True
    bias: bool = False
    alibi: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int | None = Field(default=None, ge=1, le=2)

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        if fields.get("intermediate_size") is None and isinstance(fields.get("hidden_size"), int):
            fields["intermediate_size"] = 4 * fields["hidden_size"]
        if not fields.get("new_decoder_architecture") and fields.get("multi_query") in (None, True):
            fields["num_key_value_heads"] = 1
        return super().prepare(fields, where)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        heads, new = self.num_attention_heads, self.new_decoder_architecture
        grouped = new or self.multi_query or self.num_key_value_heads == heads
        self.require(grouped, where, "num_key_value_heads", f"num_attention_heads={heads}")
        expected = "true: the new architecture has parallel branches only"
        self.require(self.parallel_attn or not new, where, "parallel_attn", expected)
        expected = "1 or null: two norms come with new_decoder_architecture"
        fits = new or self.num_ln_in_parallel_attn != 2
        self.require(fits, where, "num_ln_in_parallel_attn", expected)

    def rotation(self, number: int) -> str | None:
        return None if self.alibi else "all"

    def rotations(self) -> dict[str, RotaryEmbedding]:
        return {} if self.alibi else super().rotations()

    @property
    def use_bias(self) -> bool:
        """Return whether linears have biases."""
        return self.bias

    @property
    def two_norms(self) -> bool:
        """Return whether each of the parallel branches has a norm."""
        return self.new_decoder_architecture and self.num_ln_in_parallel_attn != 1

    @property
    def attention_norm(self) -> str:
        """Return Hugging Face's name of the norm before attention."""
        return "ln_attn" if self.two_norms else "input_layernorm"

    @property
    def mlp_norm(self) -> str:
        """Return Hugging Face's name of the norm before the feed-forward."""
        return "ln_mlp" if self.two_norms else "post_attention_layernorm"

    def to_hf(self) -> dict[str, Any]:
        # Transformers computes head_dim, and takes none.
        return {key: value for key, value in super().to_hf().items() if key != "head_dim"}


class FalconBlock(LlamaBlock):
    """Compute a block of Falcon. Source: Almazrouei et al. 2023.

        x = x + attention(attention_norm(x)) + mlp(mlp_norm(x))    * side by side, in RW one after the other

    LayerNorm; no gate, GELU. Where ``mlp_norm`` is missing (7B), ``attention_norm`` serves both branches.
    """

    make_norm, make_mlp = staticmethod(layer_norm), staticmethod(mlp)

    def __init__(self, cfg: FalconConfig, number: int, state: ParallelState) -> None:
        alibi, bias = None, cfg.use_bias
        if cfg.alibi:  # its first models were trained with biases in bf16, scaled like the scores
            alibi = Alibi(alibi_slopes(cfg.num_attention_heads), factor=cfg.head_dim**-0.5, rounded=True)
        super().__init__(cfg, number, state, qkv_bias=bias, out_bias=bias, alibi=alibi)
        self.parallel = cfg.parallel_attn
        if self.parallel and not cfg.two_norms:
            del self.mlp_norm

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        y_BSD = self.attention_norm(x_BSD)
        before_BSD, x_BSD = x_BSD, x_BSD + self.attention(y_BSD, inputs)
        if hasattr(self, "mlp_norm"):
            y_BSD = self.mlp_norm(before_BSD if self.parallel else x_BSD)
        x_BSD = x_BSD + self.mlp(y_BSD)
        return x_BSD


FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    FalconConfig,
    decoder(FalconBlock, make_norm=layer_norm),
    NAMES,
)
