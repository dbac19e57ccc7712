"""Qwen 2, 2.5 and 3: Llama with biases on queries, keys and values (2), or with normalised heads (3)."""

from typing import Any, ClassVar

from ..parallel_state import ParallelState
from .base.family import Family
from .base.keys import NO, YES, Fixed, HeadDim, Whole
from .base.parts import head_rms_norm
from .llama import LLAMA_NAMES, LlamaBlock, NoWindowsConfig, decoder

#: Other families' switches for the norms of queries and keys, which Qwen 3 always has.
HEAD_NORMS = dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm"), YES)


class Qwen2Config(NoWindowsConfig):
    """List the fields of a Qwen 2 or 2.5 config.json."""

    # Biases are on queries, keys and values.
    FIXED: ClassVar[Fixed] = {"attention_bias": YES, "qkv_bias": YES, "mlp_bias": NO}

    max_position_embeddings: Whole = 32768


class Qwen3Config(NoWindowsConfig):
    """List the fields of a Qwen 3 config.json."""

    FIXED: ClassVar[Fixed] = {**HEAD_NORMS, "mlp_bias": NO}

    head_dim: HeadDim = 128
    max_position_embeddings: Whole = 32768

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        if fields.get("head_dim") is None:  # also where it is null: not a share of the hidden size
            fields["head_dim"] = cls.default("head_dim")
        return super().prepare(fields, where)


class QwenBlock(LlamaBlock):
    """Compute a block of Qwen 2, 2.5 or 3.

    x = x + attention(attention_norm(x))    * 2: biases on queries, keys and values; 3: heads normalised
    x = x + mlp(mlp_norm(x))
    """

    def __init__(self, cfg: Qwen2Config | Qwen3Config, number: int, state: ParallelState) -> None:
        norms = head_rms_norm(cfg, state) if isinstance(cfg, Qwen3Config) else None
        super().__init__(cfg, number, state, qkv_bias=not norms or cfg.attention_bias, qk_norm=norms)


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", Qwen2Config, decoder(QwenBlock), LLAMA_NAMES)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", Qwen3Config, decoder(QwenBlock), LLAMA_NAMES)
