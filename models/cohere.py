"""Cohere's Command R and R7B: parallel branches, norms without bias, rotated neighbours, scaled logits."""

from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import ABSENT, NO, YES, Count, Epsilon, Factor, Fixed, Whole
from .base.parts import attention, gated_mlp, head_layer_norm, layer_norm
from .layer_types import LayerTypesConfig
from .llama import LLAMA_NAMES, LlamaConfig, RotaryDecoder, decoder


class CohereConfig(LlamaConfig):
    """List the fields of a Command R config.json."""

    INTERLEAVED: ClassVar[bool] = True
    FIXED: ClassVar[Fixed] = {"rms_norm_eps": ABSENT, "mlp_bias": NO}  # layer_norm_eps says it

    vocab_size: Count = 256000
    max_position_embeddings: Whole = 8192
    layer_norm_eps: Epsilon = 1e-5
    rope_theta: Factor = 500000.0
    tie_word_embeddings: bool = True
    logit_scale: Factor = 0.0625
    use_qk_norm: bool = False


unbiased_norm = partial(layer_norm, bias=False)


class CohereBlock(nn.Module):
    """Compute a block of Command R.

    y = attention_norm(x)                 * one LayerNorm, without bias, for both branches
    x = x + attention(y) + mlp(y)         * side by side
    """

    def __init__(self, cfg: CohereConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        norm = head_layer_norm(cfg, state) if cfg.use_qk_norm else None
        self.attention_norm, self.attention = unbiased_norm(cfg, state), attention(cfg, state, qk_norm=norm)
        self.mlp = gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        y_BSD = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.attention(y_BSD, inputs) + self.mlp(y_BSD)
        return x_BSD


class Cohere(RotaryDecoder):
    """Compute Command R, or the stage that this pipeline rank holds: scaled logits."""

    config: CohereConfig
    Block: ClassVar[Any] = CohereBlock
    make_norm = staticmethod(unbiased_norm)

    @property
    def logit_scale(self) -> float:
        return self.config.logit_scale


COHERE = Family("cohere", "CohereForCausalLM", CohereConfig, Cohere, LLAMA_NAMES)


class Cohere2Config(CohereConfig, LayerTypesConfig):
    """List the fields of a Command R7B config.json."""

    PATTERN: ClassVar[int] = 4
    FIXED: ClassVar[Fixed] = {
        "use_qk_norm": NO,
        **dict.fromkeys(("use_gated_activation", "use_parallel_block"), YES),
        "use_parallel_embedding": NO,
        "order_of_interleaved_layers": ("local_attn_first",),
    }

    rope_theta: Factor = 10000.0


class Cohere2Block(nn.Module):
    """Compute a block of Command R7B.

    y = attention_norm(x)                 * one LayerNorm, without bias, for both branches
    x = x + attention(y) + mlp(y)         * side by side; a window and rotation in three of four blocks
    """

    def __init__(self, cfg: Cohere2Config, number: int, state: ParallelState) -> None:
        super().__init__()
        window = cfg.window(number)
        rotary = None if window is None else "all"
        self.attention_norm = unbiased_norm(cfg, state)
        self.attention = attention(cfg, state, rotary=rotary, window=window)
        self.mlp = gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        y_BSD = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.attention(y_BSD, inputs) + self.mlp(y_BSD)
        return x_BSD


COHERE2 = Family("cohere2", "Cohere2ForCausalLM", Cohere2Config, decoder(Cohere2Block, Cohere), LLAMA_NAMES)
