"""Gemma, 2 and 3: scaled embeddings, norms by 1 + weight; then norms behind branches, and windows."""

from collections.abc import Mapping
from functools import partial
from math import sqrt
from typing import Any, ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs
from ..parallel_state import BadInput, ParallelState
from .base.causal_lm import CausalLM
from .base.family import Family
from .base.keys import ABSENT, NO, Count, Factor, Fixed, HeadDim, Whole, key
from .base.parts import attention, gated_mlp, head_rms_norm, rms_norm
from .layer_types import FULL, SLIDING, LayerRopesConfig, LayerTypesConfig
from .llama import LLAMA_NAMES, LlamaBlock, LlamaConfig, decoder
from .qwen import HEAD_NORMS


class GemmaConfig(LlamaConfig):
    """List the fields of a Gemma config.json."""

    FIXED: ClassVar[Fixed] = {
        **dict.fromkeys(("mlp_bias", "use_bidirectional_attention"), NO),
        "hidden_activation": ("gelu_pytorch_tanh",),
    }

    vocab_size: Count = 256000
    num_key_value_heads: Whole = 16
    head_dim: HeadDim = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: Whole = 8192
    tie_word_embeddings: bool = True

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        if fields.get("hidden_act") == "gelu":  # so the first releases say, and mean the approximation
            fields["hidden_act"] = "gelu_pytorch_tanh"
        return super().prepare(fields, where)


gemma_norm = partial(rms_norm, offset=1.0)


class GemmaBlock(LlamaBlock):
    """Compute a block of Gemma (Gemma Team 2024).

    x = x + attention(attention_norm(x))    * norms scale by 1 + weight
    x = x + mlp(mlp_norm(x))                * GELU
    """

    make_norm = staticmethod(gemma_norm)


class GemmaDecoder(CausalLM):
    """Scale embeddings by the root of their width, and norms by 1 + weight."""

    config: Any
    make_norm = staticmethod(gemma_norm)

    def embed_hook(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        return x_BSD * x_BSD.new_full((), sqrt(self.config.hidden_size))  # rounded to its dtype


GEMMA = Family("gemma", "GemmaForCausalLM", GemmaConfig, decoder(GemmaBlock, GemmaDecoder), LLAMA_NAMES)


GEMMA2_NAMES = LLAMA_NAMES.but(
    {
        "after_attention": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }
)


class Gemma2Config(LayerTypesConfig):
    """List the fields of a Gemma 2 config.json."""

    FIXED: ClassVar[Fixed] = dict.fromkeys(("mlp_bias", "use_bidirectional_attention"), NO)

    vocab_size: Count = 256000
    num_key_value_heads: Whole = 4
    head_dim: HeadDim = 256
    hidden_act: str = key("hidden_activation", default="gelu_pytorch_tanh")
    max_position_embeddings: Whole = 8192
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: Whole = 256
    attn_logit_softcapping: Factor | None = 50.0
    final_logit_softcapping: Factor | None = 30.0


class Gemma2Block(nn.Module):
    """Compute a block of Gemma 2 or 3 (Gemma Team 2024, 2025).

    x = x + after_attention(attention(attention_norm(x)))    * norms behind branches, in 3 also of heads;
                                                             * a window in 1 of 2 blocks, in 3 in 5 of 6
    x = x + after_mlp(mlp(mlp_norm(x)))                      * GELU; norms scale by 1 + weight
    """

    def __init__(self, cfg: Gemma2Config, number: int, state: ParallelState) -> None:
        super().__init__()
        scale, cap = cfg.query_pre_attn_scalar**-0.5, cfg.attn_logit_softcapping
        norms = head_rms_norm(cfg, state, offset=1.0) if isinstance(cfg, Gemma3Config) else None
        self.attention_norm = gemma_norm(cfg, state)
        self.attention = attention(cfg, number, state, scale=scale, soft_cap=cap, qk_norm=norms)
        self.after_attention, self.mlp_norm = gemma_norm(cfg, state), gemma_norm(cfg, state)
        self.mlp, self.after_mlp = gated_mlp(cfg, state), gemma_norm(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.after_attention(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.after_mlp(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", Gemma2Config, decoder(Gemma2Block, GemmaDecoder), GEMMA2_NAMES)


#: What the first configs called window and types of blocks.
_WINDOW, _PATTERN = "sliding_window_attention_size", "global_local_attention_pattern"


class Gemma3Config(Gemma2Config, LayerRopesConfig):
    """List the fields of a Gemma 3 config.json."""

    PATTERN: ClassVar[int] = 6
    LOCAL_THETA: ClassVar[float | None] = 10000.0
    FIXED: ClassVar[Fixed] = {**HEAD_NORMS, "use_res_clamp": NO, "attn_logit_softcapping": ABSENT}
    READ: ClassVar[frozenset[str]] = frozenset({_WINDOW, _PATTERN})

    vocab_size: Count = 262208
    max_position_embeddings: Whole = 131072
    rope_theta: Factor = 1e6
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: Factor | None = None

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        window, early = fields.get("sliding_window"), fields.get(_WINDOW)
        if early is not None and window not in (None, early):
            raise BadInput(where, _WINDOW, expected=f"{window}, as sliding_window says", found=early)
        return super().prepare(fields if early is None else {**fields, "sliding_window": early}, where)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        kinds, pattern = {"SLIDING_LOCAL": SLIDING, "GLOBAL": FULL}, raw.get(_PATTERN)
        if pattern is not None:
            of_blocks = [self.kind(number) for number in range(self.num_hidden_layers)]
            turns = [kinds.get(str(kind)) for kind in pattern] if isinstance(pattern, list) else []
            fits = turns and [turns[number % len(turns)] for number in range(len(of_blocks))] == of_blocks
            expected = "the types of blocks that layer_types or sliding_window_pattern states"
            self.require(fits, where, _PATTERN, expected, pattern)


GEMMA3 = Family(
    "gemma3_text", "Gemma3ForCausalLM", Gemma3Config, decoder(Gemma2Block, GemmaDecoder), GEMMA2_NAMES
)
