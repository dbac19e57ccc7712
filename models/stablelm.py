"""StableLM: Llama with LayerNorm and partly rotated heads; some normalise heads or have parallel branches."""

from typing import ClassVar

from torch import Tensor

from ..layers import AttentionInputs, Dropout
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import ABSENT, NO, DropoutRate, Epsilon, Fixed, Share, Whole
from .base.names import per_expert
from .base.parts import head_layer_norm, layer_norm
from .llama import LLAMA_NAMES, LlamaBlock, PartialRotaryConfig, decoder

NAMES = LLAMA_NAMES.but(
    {
        f"attention.{part}_norm": per_expert(f"self_attn.{part}_layernorm.norms.{{e}}")  # per head
        for part in ("q", "k")
    }
)


class StableLmConfig(PartialRotaryConfig):
    """List the fields of a StableLM config.json."""

    HEADS_FILL: ClassVar[bool] = True
    FIXED: ClassVar[Fixed] = {
        **dict.fromkeys(("attention_bias", "rms_norm_eps"), ABSENT),  # use_qkv_bias and layer_norm_eps say it
        "mlp_bias": NO,
    }

    num_key_value_heads: Whole = 32
    max_position_embeddings: Whole = 4096
    layer_norm_eps: Epsilon = 1e-5
    partial_rotary_factor: Share = 0.25
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False
    hidden_dropout: DropoutRate = 0.0


class StableLmBlock(LlamaBlock):
    """Compute a block of StableLM.

    x = x + attention(attention_norm(x))     * LayerNorm; heads partly rotated, some normalised
    x = x + dropout(mlp(mlp_norm(x)))        * or both branches side by side, after attention_norm
    """

    make_norm = staticmethod(layer_norm)

    def __init__(self, cfg: StableLmConfig, number: int, state: ParallelState) -> None:
        norm = head_layer_norm(cfg, state) if cfg.qk_layernorm else None
        super().__init__(cfg, number, state, qkv_bias=cfg.use_qkv_bias, qk_norm=norm)
        self.dropout, self.parallel = Dropout(cfg.hidden_dropout, state=state), cfg.use_parallel_residual
        if self.parallel:
            del self.mlp_norm

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        y_BSD = self.attention_norm(x_BSD)
        if self.parallel:
            x_BSD = x_BSD + self.attention(y_BSD, inputs) + self.dropout(self.mlp(y_BSD))
            return x_BSD
        x_BSD = x_BSD + self.attention(y_BSD, inputs)
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


STABLELM = Family(
    "stablelm", "StableLmForCausalLM", StableLmConfig, decoder(StableLmBlock, make_norm=layer_norm), NAMES
)
