"""Granite 3: Llama with four factors; Granite 4: with Mamba-2 in most blocks, and experts in some sizes."""

from collections.abc import Mapping
from math import inf
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs, Mamba2
from ..parallel_state import ParallelState
from .base.causal_lm import CausalLM
from .base.family import Family
from .base.keys import MOST_BLOCKS, NO, Count, Factor, Fixed, Whole, Width, key
from .base.names import fused
from .base.parts import attention, gated_mlp, mixture, rms_norm
from .expert_block import ExpertsConfig
from .llama import LLAMA_NAMES, LlamaBlock, LlamaConfig, decoder
from .qwen_hybrid import FULL, LINEAR, check_mixers


class GraniteConfig(LlamaConfig):
    """List the fields of a Granite config.json."""

    vocab_size: Count = 32000
    embedding_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0

    @property
    def logit_scale(self) -> float:
        """Return the factor of the logits."""
        return 1 / self.logits_scaling


class GraniteBlock(LlamaBlock):
    """Compute a block of Granite 3.

    x = x + attention(attention_norm(x)) * scale    * scores and branches have factors
    x = x + mlp(mlp_norm(x)) * scale
    """

    def __init__(self, cfg: GraniteConfig, number: int, state: ParallelState) -> None:
        super().__init__(cfg, number, state, scale=cfg.attention_multiplier)
        self.scale = cfg.residual_multiplier

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs) * self.scale
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD)) * self.scale
        return x_BSD


class Granite(CausalLM):
    """Compute Granite 3, or the stage that this pipeline rank holds: embeddings are scaled."""

    config: GraniteConfig
    Block: ClassVar[Any] = GraniteBlock

    def embed_hook(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        return x_BSD * self.config.embedding_multiplier


GRANITE = Family("granite", "GraniteForCausalLM", GraniteConfig, Granite, LLAMA_NAMES)


#: What transformers 4 called the types of blocks.
_OLDER = {"mamba": LINEAR, "attention": FULL}
#: The length of a chunk changes no result, so this key is accepted and not used: we choose our own length.
_CHUNK = "mamba_chunk_size"
#: The width of a mixer's head, or "auto". It follows from other fields, so it is only compared with them.
_WIDTH = "mamba_d_head"


class GraniteHybridConfig(GraniteConfig, ExpertsConfig):
    """List the fields of a Granite 4 config.json.

    With ``num_local_experts`` 0 a block has no experts: all tokens pass its shared feed-forward alone.
    """

    FIXED: ClassVar[Fixed] = {
        "mlp_bias": NO,
        "time_step_limit": ((0.0, inf), [0.0, inf], [0.0, {"__float__": "Infinity"}]),
    }
    READ: ClassVar[frozenset[str]] = frozenset({_CHUNK, _WIDTH})

    intermediate_size: Width = 11008
    num_local_experts: int = Field(default=8, ge=0, le=2**12)
    num_experts_per_tok: int = Field(default=2, ge=0)
    shared_intermediate_size: Width = 1024
    position_embedding_type: Literal["rope"] | None = None
    layer_types: tuple[str, ...] = key("layer_types", "layers_block_type", default=())
    mamba_n_heads: int = Field(default=128, gt=0, le=2**16)
    mamba_d_state: int = Field(default=256, gt=0, le=2**16)
    mamba_n_groups: Whole = 1
    mamba_d_conv: int = Field(default=4, gt=0, le=2**8)
    mamba_expand: int = Field(default=2, gt=0, le=2**10)
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        kinds, count = fields.get("layer_types"), fields.get("num_hidden_layers")
        if isinstance(kinds, list):
            fields["layer_types"] = [_OLDER.get(kind, kind) for kind in kinds]
        elif kinds is None and isinstance(count, int):
            fields["layer_types"] = (LINEAR,) * min(count, MOST_BLOCKS)
        return super().prepare(fields, where)

    def check_layer_types(self, layer_types: object, where: str) -> None:
        check_mixers(self, self.layer_types, where)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        inner, heads = self.mamba_expand * self.hidden_size, self.mamba_n_heads
        expected = f"a divisor of mamba_expand x hidden_size = {inner}"
        self.require(inner % heads == 0, where, "mamba_n_heads", expected)
        fits = heads % self.mamba_n_groups == 0
        self.require(fits, where, "mamba_n_groups", f"a divisor of mamba_n_heads={heads}")
        length, width = raw.get(_CHUNK), raw.get(_WIDTH)
        fits = length is None or (type(length) is int and length > 0)
        self.require(fits, where, _CHUNK, "a whole number from 1 up", length)
        expected = f"{self.mamba_d_head}, mamba_expand x hidden_size / mamba_n_heads"
        self.require(width in (None, "auto", self.mamba_d_head), where, _WIDTH, expected, width)

    @property
    def mamba_d_head(self) -> int:
        """Return the width of a head of a Mamba-2 mixer."""
        return self.mamba_expand * self.hidden_size // self.mamba_n_heads

    def rotation(self, number: int) -> str | None:
        return "all" if self.position_embedding_type == "rope" else None

    def has_experts(self, number: int) -> bool:
        return self.num_local_experts > 0

    @property
    def tensor_units(self) -> dict[str, int]:
        units = {**super().tensor_units, "shared_intermediate_size": self.shared_intermediate_size}
        if not self.num_local_experts:
            del units["intermediate_size"]
        return {**units, "mamba_n_heads": self.mamba_n_heads}


class GraniteHybridBlock(nn.Module):
    """Compute a block of Granite 4. Its mixer has other names than attention, since files tell the two apart.

    x = x + mixer(mixer_norm(x)) * scale            * Mamba-2, or in some blocks:
    x = x + attention(attention_norm(x)) * scale    * no rotation; scores and branches have factors
    x = x + mlp(mlp_norm(x)) * scale                * in some sizes experts and a net for all tokens
    """

    def __init__(self, cfg: GraniteHybridConfig, number: int, state: ParallelState) -> None:
        super().__init__()
        self.recurrent, self.scale = cfg.layer_types[number] == LINEAR, cfg.residual_multiplier
        if self.recurrent:
            self.mixer_norm = rms_norm(cfg, state)
            self.mixer = Mamba2(
                cfg.hidden_size,
                heads=cfg.mamba_n_heads,
                head_dim=cfg.mamba_d_head,
                state_dim=cfg.mamba_d_state,
                groups=cfg.mamba_n_groups,
                kernel_size=cfg.mamba_d_conv,
                act=cfg.hidden_act,
                bias=cfg.mamba_proj_bias,
                conv_bias=cfg.mamba_conv_bias,
                eps=cfg.rms_norm_eps,
                initial=cfg.initial,
                state=state,
            )
        else:
            self.attention_norm = rms_norm(cfg, state)
            self.attention = attention(cfg, number, state, scale=cfg.attention_multiplier)
        self.mlp_norm = rms_norm(cfg, state)
        experts = cfg.has_experts(number)
        shared = gated_mlp(cfg, state, cfg.shared_intermediate_size, entered=experts)
        self.mlp = mixture(cfg, state, shared=shared) if experts else shared

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        if self.recurrent:
            x_BSD = x_BSD + self.mixer(self.mixer_norm(x_BSD), inputs) * self.scale
        else:
            x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs) * self.scale
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD)) * self.scale
        return x_BSD


HYBRID_NAMES = LLAMA_NAMES.but(
    {
        "mixer_norm": "input_layernorm",
        "mixer.inner": fused("mamba.in_proj", "z x B C dt"),
        "mixer.conv": fused("mamba.conv1d", "x B C"),
        **{f"mixer.{name}": f"mamba.{name}" for name in ("A_log", "D", "dt_bias", "norm")},
        "mixer.out": "mamba.out_proj",
        # All tokens pass a net that, without experts, is the only one.
        "mlp.gate_up": fused("shared_mlp.input_linear", "gate up"),
        "mlp.down": "shared_mlp.output_linear",
        "mlp.shared.gate_up": fused("shared_mlp.input_linear", "gate up"),
        "mlp.shared.down": "shared_mlp.output_linear",
        **dict.fromkeys(("mlp.gate_up.gate", "mlp.gate_up.up")),
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts": fused("block_sparse_moe.input_linear.weight", "gate up", dim=1),
        "mlp.experts.down": "block_sparse_moe.output_linear.weight",
    }
)

GRANITE_HYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    GraniteHybridConfig,
    decoder(GraniteHybridBlock, Granite),
    HYBRID_NAMES,
    experts_module="model.layers.{i}.block_sparse_moe.experts",
)
