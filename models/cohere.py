"""Cohere's Command R and R7B: parallel branches, norms without bias, rotated neighbours, scaled logits."""

from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import ABSENT, NO, YES, Count, Epsilon, Factor, Fixed, Whole
from .base.parts import attention, gated_mlp, head_layer_norm, layer_norm
from .layer_types import LayerTypesConfig
from .llama import LLAMA_NAMES, LlamaConfig, decoder


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
    """Compute a block of Command R or R7B.

    y = attention_norm(x)                 * one LayerNorm, without bias, for both branches
    x = x + attention(y) + mlp(y)         * side by side; R7B: a window and rotation in three of four blocks
    """

    def __init__(self, cfg: CohereConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        norms = head_layer_norm(cfg, state) if cfg.use_qk_norm else None
        self.attention_norm = unbiased_norm(cfg, state)
        self.attention = attention(cfg, number, state, qk_norm=norms)
        self.mlp = gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        y_BSD = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.attention(y_BSD, inputs) + self.mlp(y_BSD)
        return x_BSD


Cohere = decoder(CohereBlock, make_norm=unbiased_norm)
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

    def rotation(self, number: int) -> str | None:
        return None if self.window(number) is None else "all"


COHERE2 = Family("cohere2", "Cohere2ForCausalLM", Cohere2Config, Cohere, LLAMA_NAMES)
