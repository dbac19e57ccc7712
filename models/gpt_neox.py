"""GPT-NeoX and Pythia: parallel branches with two norms, partly rotated heads, biases, qkv by heads."""

from typing import ClassVar

from torch import Tensor

from ..layers import AttentionInputs, Dropout
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import ABSENT, YES, DropoutRate, Epsilon, Factor, Fixed, Share, key
from .base.names import Names, fused
from .base.parts import layer_norm, mlp
from .llama import LlamaBlock, PartialRotaryConfig, decoder

NAMES = Names(
    "gpt_neox.layers.{i}",
    {"embed": "gpt_neox.embed_in"},
    {
        "attention_norm": "input_layernorm",
        "attention.qkv": fused("attention.query_key_value", "q k v", groups="num_attention_heads"),
        "attention.out": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
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
    ignorable=tuple(
        f"gpt_neox.layers.{{i}}.attention.{leaf}" for leaf in ("bias", "masked_bias", "rotary_emb.inv_freq")
    ),
    tied_head="embed_out.weight",
)
