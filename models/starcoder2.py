"""StarCoder 2: GPT-2's norms, feed-forward and biases with Llama's rotated and grouped heads."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs, Dropout
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import ABSENT, DropoutRate, Epsilon, Fixed, Whole, key
from .base.parts import attention, layer_norm, mlp
from .llama import LLAMA_NAMES, LlamaConfig, decoder

NAMES = LLAMA_NAMES.but({"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"})


class Starcoder2Config(LlamaConfig):
    """List the fields of a StarCoder 2 config.json."""

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


class Starcoder2Block(nn.Module):
    """Compute a block of StarCoder 2. Source: Lozhkov et al. 2024.

    x = x + dropout(attention(attention_norm(x)))    * LayerNorm; biases, a window
    x = x + dropout(mlp(mlp_norm(x)))                * biases, no gate, GELU
    """

    def __init__(self, cfg: Starcoder2Config, number: int, state: ParallelState) -> None:
        super().__init__()
        bias, window = cfg.use_bias, cfg.sliding_window
        self.attention_norm = layer_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=bias, out_bias=bias, window=window)
        self.mlp_norm, self.mlp = layer_norm(cfg, state), mlp(cfg, state, bias=bias)
        self.dropout = Dropout(cfg.residual_dropout, state=state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    Starcoder2Config,
    decoder(Starcoder2Block, make_norm=layer_norm, embedding_dropout="embedding_dropout"),
    NAMES,
)
