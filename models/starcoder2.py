"""StarCoder 2: GPT-2's norms, feed-forward and biases with Llama's rotated and grouped heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import MLP, Attention, Dropout, LayerNorm
from .base.config import names
from .base.family import Family
from .base.hugging_face_names import BOTH, Rename, in_blocks
from .llama import ATTENTION, EMBEDDING, Llama, LlamaConfig, grouped_attention

NAMES = (
    *EMBEDDING,
    *ATTENTION,
    *in_blocks(
        ("mlp.up", "mlp.c_fc"),
        ("mlp.down", "mlp.c_proj"),
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        kinds=BOTH,
    ),
    *(Rename(f"norm.{kind}", f"model.norm.{kind}") for kind in BOTH),
    Rename("head.weight", "lm_head.weight"),
)


class Starcoder2Config(LlamaConfig):
    """List the fields of a StarCoder 2 config.json that the model computes with."""

    OWN_NAMES: ClassVar[Mapping[str, str]] = {"norm_epsilon": "layer_norm_eps"}
    NOT_KEYS: ClassVar[frozenset[str]] = names("layer_norm_eps")
    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **LlamaConfig.HARMLESS,
        **dict.fromkeys(
            ("attention_bias", "mlp_bias", "rms_norm_eps"), ()
        ),  # use_bias and norm_epsilon say it
        "mlp_type": ("default",),
        "norm_type": ("layer_norm",),
    }

    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = Field(default=4096, gt=0)
    initializer_range: float = Field(default=0.018042, ge=0, le=10)
    layer_norm_eps: float = Field(default=1e-5, gt=0, lt=0.1)
    tie_word_embeddings: bool = True
    use_bias: bool = True
    sliding_window: int | None = Field(default=None, gt=0)
    residual_dropout: float = Field(default=0.0, ge=0, lt=1)
    embedding_dropout: float = Field(default=0.0, ge=0, lt=1)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        return super().read({"num_key_value_heads": 2, **raw}, where)

    def to_hf(self) -> dict[str, Any]:
        return {self.spelled(key): value for key, value in super().to_hf().items()}

    @property
    def layer_type(self) -> str:
        return "full_attention" if self.sliding_window is None else "sliding_attention"


class Starcoder2(Llama):
    """Compute StarCoder 2, or the stage that this pipeline rank holds."""

    config: Starcoder2Config

    @property
    def branch_dropout(self) -> float:
        return self.config.residual_dropout

    def attention(self, number: int) -> Attention:
        bias, window = self.config.use_bias, self.config.sliding_window
        return grouped_attention(self.config, self.state, qkv_bias=bias, out_bias=bias, window=window)

    def feed_forward(self, number: int) -> nn.Module:
        cfg = self.config
        return MLP(
            cfg.hidden_size,
            cfg.intermediate_size,
            act=cfg.hidden_act,
            bias=cfg.use_bias,
            initial=self.initial,
            state=self.state,
        )

    def make_norm(self) -> nn.Module:
        return LayerNorm(self.config.hidden_size, self.config.layer_norm_eps, state=self.state)

    def add_entry(self) -> None:
        self.dropout = Dropout(self.config.embedding_dropout, state=self.state)

    def enter(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        dropped: Tensor = self.dropout(x_BSD)
        return dropped


STARCODER2 = Family("starcoder2", "Starcoder2ForCausalLM", Starcoder2Config, Starcoder2, NAMES)
