"""Qwen 2, 2.5 and 3: Llama with biases on queries, keys and values (2), or with normalised heads (3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ..layers import Attention
from ..parallel_state import BadInput
from .base.family import Family
from .base.hugging_face_names import in_blocks
from .llama import NAMES, Llama, LlamaConfig, grouped_attention

#: Other families' switches for the norms of queries and keys, which Qwen 3 always has.
HEAD_NORMS = ("use_qk_norm", "qk_norm", "qk_layernorm")

#: Keys of windows over some of the blocks, which are off in every released model and refused if on.
WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers")


class Qwen2Config(LlamaConfig):
    """List the fields of a Qwen 2 or 2.5 config.json that the model computes with."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LlamaConfig.HARMLESS,
        **dict.fromkeys(("attention_bias", "qkv_bias"), (True,)),  # on queries, keys and values
        "mlp_bias": (False,),
    }

    max_position_embeddings: int = Field(default=32768, gt=0)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        check_no_windows(raw, where)
        return super().read(raw, where)

    @classmethod
    def read_keys(cls) -> set[str]:
        return {*super().read_keys(), *WINDOWS}


class Qwen2(Llama):
    """Compute Qwen 2 or 2.5, or the stage that this pipeline rank holds."""

    def attention(self, number: int) -> Attention:
        return grouped_attention(self.config, self.state, qkv_bias=True)


class Qwen3Config(LlamaConfig):
    """List the fields of a Qwen 3 config.json that the model computes with."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LlamaConfig.HARMLESS,
        **dict.fromkeys(HEAD_NORMS, (True,)),
        "mlp_bias": (False,),
    }

    max_position_embeddings: int = Field(default=32768, gt=0)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        check_no_windows(raw, where)
        # Hugging Face's default is a number, not a share of the hidden size.
        return super().read(raw if raw.get("head_dim") is not None else {**raw, "head_dim": 128}, where)

    @classmethod
    def read_keys(cls) -> set[str]:
        return {*super().read_keys(), *WINDOWS}


class Qwen3(Llama):
    """Compute Qwen 3, or the stage that this pipeline rank holds."""

    def attention(self, number: int) -> Attention:
        bias = self.config.attention_bias
        return grouped_attention(self.config, self.state, qkv_bias=bias, out_bias=bias, head_norms=True)


def check_no_windows(raw: Mapping[str, Any], where: str) -> None:
    """Refuse a window over some blocks; ``sliding_window`` alone says nothing as long as it is not used."""
    if raw.get("use_sliding_window") not in (None, False):
        expected = "false: windows over some of the blocks are not supported"
        raise BadInput(where, "use_sliding_window", expected=expected, found=raw["use_sliding_window"])


QK_NORM_NAMES = in_blocks(("attention.q_norm", "self_attn.q_norm"), ("attention.k_norm", "self_attn.k_norm"))

QWEN2 = Family("qwen2", "Qwen2ForCausalLM", Qwen2Config, Qwen2, NAMES)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", Qwen3Config, Qwen3, (*NAMES, *QK_NORM_NAMES))
