"""Gemma 3 (text): Gemma 2 with norms of heads for bounded scores, and a rotation of its own under windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ..layers import AttentionInputs, RotaryEmbedding
from ..parallel_state import BadInput, ParallelState
from .base.family import Family
from .base.fields import ABSENT, NO, Count, Factor, Fixed, Whole
from .base.parts import AttentionOptions, attention, gated_mlp, head_rms_norm
from .gemma import gemma_norm
from .gemma2 import NAMES, Gemma2, Gemma2Config
from .layer_ropes import LayerRopesConfig
from .layer_types import FULL, SLIDING
from .qwen import HEAD_NORMS

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
        kinds, stated = {"SLIDING_LOCAL": SLIDING, "GLOBAL": FULL}, raw.get(_PATTERN)
        if stated is not None:
            of_blocks = [self.kind(number) for number in range(self.num_hidden_layers)]
            turns = [kinds.get(str(kind)) for kind in stated] if isinstance(stated, list) else []
            fits = turns and [turns[number % len(turns)] for number in range(len(of_blocks))] == of_blocks
            expected = "the types of blocks that layer_types or sliding_window_pattern states"
            self.require(fits, where, _PATTERN, expected, stated)


class Gemma3Block(nn.Module):
    """Compute a block of Gemma 3 (Gemma Team 2025).

    x = x + after_attention(attention(attention_norm(x)))    * norms behind and of heads; a window in 5 of 6
    x = x + after_mlp(mlp(mlp_norm(x)))                      * GELU; norms scale by 1 + weight
    """

    def __init__(self, cfg: Gemma3Config, number: int, state: ParallelState) -> None:
        super().__init__()
        bias, norms = cfg.attention_bias, head_rms_norm(cfg, state, offset=1.0)
        options = AttentionOptions(rotary=cfg.kind(number), window=cfg.window(number), qk_norm=norms)
        options["scale"] = cfg.query_pre_attn_scalar**-0.5
        self.attention_norm = gemma_norm(cfg, state)
        self.attention = attention(cfg, state, qkv_bias=bias, out_bias=bias, **options)
        self.after_attention, self.mlp_norm = gemma_norm(cfg, state), gemma_norm(cfg, state)
        self.mlp, self.after_mlp = gated_mlp(cfg, state), gemma_norm(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.after_attention(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.after_mlp(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


class Gemma3(Gemma2):
    """Compute Gemma 3, or the stage that this pipeline rank holds: two rotations."""

    config: Gemma3Config
    Block = Gemma3Block

    def make_rotary(self) -> Mapping[str, RotaryEmbedding]:
        return self.config.rotations()


GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", Gemma3Config, Gemma3, NAMES)
