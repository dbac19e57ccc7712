"""Define config fields and blocks of hybrids: gated delta nets, and gated attention in every n-th block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from ..layers import Attention, GatedDeltaNet
from ..parallel_state import BadInput, ParallelState
from .base.fields import NO, Fixed, HeadDim, Share, Whole
from .base.keys import MOST_BLOCKS
from .base.names import fused
from .base.parts import attention, head_rms_norm, initial, rms_norm
from .llama import NAMES as LLAMA_NAMES
from .llama import LlamaConfig
from .partial_rotary import PartialRotaryConfig
from .qwen import HEAD_NORMS, NoWindowsConfig

LINEAR, FULL = "linear_attention", "full_attention"
#: Where a config does not list the types of its blocks: every so many blocks one has attention.
_INTERVAL = "full_attention_interval"


class DeltaNetConfig(NoWindowsConfig, PartialRotaryConfig):
    """List the fields that tell which blocks have a delta net, and its shape; the others have attention."""

    FIXED: ClassVar[Fixed] = {**HEAD_NORMS, "mlp_bias": NO}
    READ: ClassVar[frozenset[str]] = frozenset({_INTERVAL})

    head_dim: HeadDim = 256
    partial_rotary_factor: Share = 0.25
    max_position_embeddings: Whole = 32768
    layer_types: tuple[str, ...] = ()
    linear_conv_kernel_dim: int = Field(default=4, gt=0, le=2**8)
    linear_key_head_dim: int = Field(default=128, gt=0, le=2**12)
    linear_value_head_dim: int = Field(default=128, gt=0, le=2**12)
    linear_num_key_heads: int = Field(default=16, gt=0, le=2**12)
    linear_num_value_heads: int = Field(default=32, gt=0, le=2**12)

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        if fields.get("head_dim") is None:  # also where it is null: not a share of the hidden size
            fields["head_dim"] = cls.default("head_dim")
        count, every = fields.get("num_hidden_layers"), fields.get(_INTERVAL)
        every = 4 if every is None else every
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise BadInput(where, _INTERVAL, expected="a whole number from 1 up", found=repr(every)[:80])
        if fields.get("layer_types") is None and isinstance(count, int):
            numbers = range(1, min(count, MOST_BLOCKS) + 1)
            fields["layer_types"] = tuple(LINEAR if number % every else FULL for number in numbers)
        return super().prepare(fields, where)

    def check_layer_types(self, stated: object, where: str) -> None:
        check_mixers(self, self.layer_types, where)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        expected = f"a multiple of linear_num_key_heads={keys}"
        self.require(values % keys == 0, where, "linear_num_value_heads", expected)

    @property
    def tensor_units(self) -> dict[str, int]:
        return {**super().tensor_units, "linear_num_key_heads": self.linear_num_key_heads}


def check_mixers(config: LlamaConfig, kinds: Sequence[str], where: str) -> None:
    """Refuse a list of types that is not one of the two for each block."""
    blocks = config.num_hidden_layers
    fits = len(kinds) == blocks and set(kinds) <= {LINEAR, FULL}
    config.require(fits, where, "layer_types", f"{LINEAR} or {FULL} for each of {blocks} blocks", [*kinds])


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
