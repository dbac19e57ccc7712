"""StarCoder 2: GPT-2's norms, feed-forward and biases with Llama's rotated and grouped heads."""

from typing import ClassVar

from pydantic import Field

from .base.family import Family
from .base.keys import ABSENT, DropoutRate, Epsilon, Fixed, Whole, key
from .base.parts import layer_norm
from .llama import LLAMA_NAMES, LlamaConfig, decoder
from .opt import OPTBlock

NAMES = LLAMA_NAMES.but({"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"})


class Starcoder2Config(LlamaConfig):
    """List the fields of a StarCoder 2 config.json; its blocks are OPT's, rotated and with a window."""

    FIXED: ClassVar[Fixed] = {
        # use_bias and norm_epsilon say it
        **dict.fromkeys(("attention_bias", "mlp_bias", "rms_norm_eps"), ABSENT),
        "mlp_type": ("default",),
        "norm_type": ("layer_norm",),
    }

    num_key_value_heads: Whole = 2
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: Whole = 4096
    initializer_range: float = Field(default=0.018042, ge=0, le=10)
    layer_norm_eps: Epsilon = key("norm_epsilon", default=1e-5)
    tie_word_embeddings: bool = True
    use_bias: bool = True
    sliding_window: Whole | None = None
    residual_dropout: DropoutRate = 0.0
    embedding_dropout: DropoutRate = 0.0


STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    Starcoder2Config,
    decoder(OPTBlock, make_norm=layer_norm, embedding_dropout="embedding_dropout"),
    NAMES,
)
