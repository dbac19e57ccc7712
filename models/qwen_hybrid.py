"""Qwen3-Next and Qwen 3.5's text model: three blocks with a gated delta net to one with gated attention."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs, GatedDeltaNet
from ..parallel_state import BadInput, ParallelState
from ..system import literal
from .base.family import Family
from .base.keys import MOST_BLOCKS, Experts, HeadDim, Share, Whole, Width
from .base.names import fused
from .base.parts import attention, gated_mlp, head_rms_norm, rms_norm
from .llama import LLAMA_NAMES, LlamaConfig, PartialRotaryConfig, decoder
from .qwen import SHARED_MIXTURE, Qwen3Config, SharedExpertConfig, qwen_mixture

LINEAR, FULL = "linear_attention", "full_attention"
#: Where a config does not list the types of its blocks: every how many blocks one has attention.
_INTERVAL = "full_attention_interval"


class DeltaNetConfig(Qwen3Config, PartialRotaryConfig):
    """List the fields that tell which blocks have a delta net, and its shape; the others have attention.

    Published checkpoints hold one block more, under ``mtp``, which predicts further tokens; it is left out,
    as transformers does.
    """

    READ: ClassVar[frozenset[str]] = frozenset({_INTERVAL})

    head_dim: HeadDim = 256
    partial_rotary_factor: Share = 0.25
    layer_types: tuple[str, ...] = ()
    linear_conv_kernel_dim: int = Field(default=4, gt=0, le=2**8)
    linear_key_head_dim: int = Field(default=128, gt=0, le=2**12)
    linear_value_head_dim: int = Field(default=128, gt=0, le=2**12)
    linear_num_key_heads: int = Field(default=16, gt=0, le=2**12)
    linear_num_value_heads: int = Field(default=32, gt=0, le=2**12)

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        count, interval = fields.get("num_hidden_layers"), fields.get(_INTERVAL)
        interval = 4 if interval is None else interval
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise BadInput(where, _INTERVAL, expected="a whole number from 1 up", found=literal(interval))
        if fields.get("layer_types") is None and isinstance(count, int):
            numbers = range(1, min(count, MOST_BLOCKS) + 1)
            fields["layer_types"] = tuple(LINEAR if number % interval else FULL for number in numbers)
        return super().prepare(fields, where)

    @property
    def further_blocks(self) -> int:
        return 1

    def check_layer_types(self, layer_types: object, where: str) -> None:
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


class QwenHybridBlock(nn.Module):
    """Compute a block of either. Its mixer has other names than attention, since files tell them apart.

    x = x + mixer(mixer_norm(x))            * gated delta net; norms scale by 1 + weight
    x = x + attention(attention_norm(x))    * in every fourth block: gated, heads normalised, partly rotated
    x = x + mlp(mlp_norm(x))                * Qwen3-Next: experts, and a gated net for all tokens
    """

    def __init__(self, cfg: Any, number: int, state: ParallelState) -> None:
        super().__init__()
        self.recurrent = cfg.layer_types[number] == LINEAR
        if self.recurrent:
            self.mixer_norm = hybrid_norm(cfg, state)
            self.mixer = GatedDeltaNet(
                cfg.hidden_size,
                key_heads=cfg.linear_num_key_heads,
                value_heads=cfg.linear_num_value_heads,
                key_dim=cfg.linear_key_head_dim,
                value_dim=cfg.linear_value_head_dim,
                kernel_size=cfg.linear_conv_kernel_dim,
                act=cfg.hidden_act,
                eps=cfg.rms_norm_eps,
                initial=cfg.initial,
                state=state,
            )
        else:
            norms = head_rms_norm(cfg, state, offset=1.0)
            self.attention_norm = hybrid_norm(cfg, state)
            self.attention = attention(cfg, number, state, qk_norm=norms, gated=True)
        self.mlp_norm = hybrid_norm(cfg, state)
        self.mlp = qwen_mixture(cfg, state) if cfg.has_experts(number) else gated_mlp(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        if self.recurrent:
            x_BSD = x_BSD + self.mixer(self.mixer_norm(x_BSD), inputs)
        else:
            x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class Qwen3NextConfig(DeltaNetConfig, SharedExpertConfig):
    """List the fields of a Qwen3-Next config.json; blocks of ``mlp_only_layers`` have one net."""

    num_key_value_heads: Whole = 2
    num_local_experts: Experts = 512
    num_experts_per_tok: Whole = 10
    moe_intermediate_size: Width = 512
    shared_expert_intermediate_size: Width = 512
    norm_topk_prob: bool = True


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    Qwen3NextConfig,
    decoder(QwenHybridBlock, make_norm=hybrid_norm),
    NAMES.but(
        {
            # A key head's queries and keys come together with its values, and with their gates.
            "mixer.qkvz": fused("linear_attn.in_proj_qkvz", "q k v z", groups="linear_num_key_heads"),
            "mixer.ba": fused("linear_attn.in_proj_ba", "b a", groups="linear_num_key_heads"),
            **SHARED_MIXTURE,
        }
    ),
    further="mtp.",
)


#: How a rotation is shared out among the places of an image's pieces; a text has the same place in all three.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


class Qwen35Config(DeltaNetConfig):
    """List the fields of a Qwen 3.5 text config.json."""

    num_key_value_heads: Whole = 4

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        rope = fields.get("rope_parameters")
        if isinstance(rope, dict):
            fields["rope_parameters"] = {key: rope[key] for key in rope if key not in _OF_IMAGES}
        return super().prepare(fields, where)


QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    Qwen35Config,
    decoder(QwenHybridBlock, make_norm=hybrid_norm),
    NAMES.but(
        {
            "mixer.qkvz": fused("linear_attn.in_proj_qkv", "q k v"),
            "mixer.qkvz.z": "linear_attn.in_proj_z",
            "mixer.ba.b": "linear_attn.in_proj_b",
            "mixer.ba.a": "linear_attn.in_proj_a",
        }
    ),
    further="mtp.",
)
