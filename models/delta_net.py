"""Define config fields and blocks of hybrids: gated delta nets, and gated attention in every n-th block."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from ..layers import Attention, GatedDeltaNet
from ..parallel_state import BadInput, ParallelState
from .base.config import MOST_BLOCKS
from .base.names import fused
from .base.parts import attention, head_rms_norm, initial, rms_norm
from .llama import NAMES as LLAMA_NAMES
from .partial_rotary import PartialRotaryConfig
from .qwen import HEAD_NORMS, QWEN3, check_no_windows

LINEAR, FULL = "linear_attention", "full_attention"
#: Where a config does not list the types of its blocks: every so many blocks one has attention.
_INTERVAL = "full_attention_interval"


class DeltaNetConfig(PartialRotaryConfig):
    """List the fields that tell which blocks have a delta net, and its shape; the others have attention."""

    HARMLESS: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **PartialRotaryConfig.HARMLESS,
        **dict.fromkeys(HEAD_NORMS, (True,)),
        "mlp_bias": (False,),
    }

    head_dim: int = Field(default=256, gt=0, le=2**16, multiple_of=2)
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    max_position_embeddings: int = Field(default=32768, gt=0)
    layer_types: tuple[str, ...] = ()
    linear_conv_kernel_dim: int = Field(default=4, gt=0, le=2**8)
    linear_key_head_dim: int = Field(default=128, gt=0, le=2**12)
    linear_value_head_dim: int = Field(default=128, gt=0, le=2**12)
    linear_num_key_heads: int = Field(default=16, gt=0, le=2**12)
    linear_num_value_heads: int = Field(default=32, gt=0, le=2**12)

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        check_no_windows(raw, where)
        # Hugging Face's default is a number, not a share of the hidden size.
        raw = raw if raw.get("head_dim") is not None else {**raw, "head_dim": 256}
        fields = super().read(raw, where)
        kinds, count, every = raw.get("layer_types"), raw.get("num_hidden_layers"), raw.get(_INTERVAL)
        every = 4 if every is None else every
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise BadInput(where, _INTERVAL, expected="a whole number from 1 up", found=repr(every)[:80])
        if isinstance(kinds, list):
            fields["layer_types"] = tuple(kinds)
        elif kinds is None and isinstance(count, int):
            made = (LINEAR if (number + 1) % every else FULL for number in range(min(count, MOST_BLOCKS)))
            fields["layer_types"] = tuple(made)
        return fields

    @classmethod
    def read_keys(cls) -> set[str]:
        return {*super().read_keys(), *QWEN3.config.read_keys(), _INTERVAL}

    def check_stated(self, raw: Mapping[str, Any], where: str) -> None:
        kinds, count = self.layer_types, self.num_hidden_layers
        if len(kinds) != count or set(kinds) - {LINEAR, FULL}:
            expected = f"{LINEAR} or {FULL} for each of {count} blocks"
            raise BadInput(where, "layer_types", expected=expected, found=repr(list(kinds))[:80])

    def check(self, where: str) -> None:
        super().check(where)
        if self.linear_num_value_heads % self.linear_num_key_heads:
            expected = f"a multiple of linear_num_key_heads={self.linear_num_key_heads}"
            raise BadInput(
                where, "linear_num_value_heads", expected=expected, found=self.linear_num_value_heads
            )

    @property
    def tensor_units(self) -> dict[str, int]:
        return {**super().tensor_units, "linear_num_key_heads": self.linear_num_key_heads}

    def to_hf(self) -> dict[str, Any]:
        return {**super().to_hf(), "layer_types": [*self.layer_types]}


hybrid_norm = partial(rms_norm, offset=1.0)


def gated_attention(cfg: DeltaNetConfig, state: ParallelState) -> Attention:
    """Make attention behind a gate, with a norm of each head."""
    bias, norms = cfg.attention_bias, head_rms_norm(cfg, state, offset=1.0)
    return attention(cfg, state, qkv_bias=bias, out_bias=bias, qk_norm=norms, gated=True)


def delta_net(cfg: DeltaNetConfig, state: ParallelState) -> GatedDeltaNet:
    """Make the gated delta net of a block."""
    return GatedDeltaNet(
        cfg.hidden_size,
        key_heads=cfg.linear_num_key_heads,
        value_heads=cfg.linear_num_value_heads,
        key_dim=cfg.linear_key_head_dim,
        value_dim=cfg.linear_value_head_dim,
        kernel_size=cfg.linear_conv_kernel_dim,
        act=cfg.hidden_act,
        eps=cfg.rms_norm_eps,
        initial=initial(cfg),
        state=state,
    )


#: Ours -> Hugging Face's, but for what brings a delta net's input in, and the experts.
NAMES = LLAMA_NAMES.but(
    {
        "mixer_norm": "input_layernorm",
        "mixer.dt_bias": "linear_attn.dt_bias",
        "mixer.A_log": "linear_attn.A_log",
        "mixer.conv": fused("linear_attn.conv1d", "q k v"),
        "mixer.norm": "linear_attn.norm",
        "mixer.out": "linear_attn.out_proj",
        "attention.qkv.q": None,
        # Queries and their gate take turns head by head.
        "attention.qkv": fused("self_attn.q_proj", "q gate", groups="num_attention_heads"),
    }
)
