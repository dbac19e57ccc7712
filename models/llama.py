"""Llama 2 and 3; SmolLM 3, in which some blocks have no positions; Seed-OSS, with biases and dropout."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Unpack

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs, Dropout, RotaryEmbedding
from ..parallel_state import BadInput, ParallelState
from .base.causal_lm import CausalLM
from .base.config import OTHER_WAY, ModelConfig
from .base.family import Family
from .base.keys import NO, ONE, DropoutRate, Epsilon, Factor, Fixed, HeadDim, Share, Whole, names
from .base.names import Names
from .base.parts import AttentionOptions, attention, gated_mlp, mixture, rms_norm
from .base.rope_config import RopeScaling, check_factors, read_rope, take_share


class LlamaConfig(ModelConfig):
    """List the fields of a Llama config.json."""

    FIXED: ClassVar[Fixed] = {
        **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm", "use_mrope"), NO),
        **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "logits_scaling", "logit_scale"), ONE),
        **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), ONE),
    }
    READ: ClassVar[frozenset[str]] = names("rope_parameters layer_types")
    #: Whether heads together must be as wide as the hidden states.
    HEADS_FILL: ClassVar[bool] = False
    #: Whether the numbers of a rotated pair are neighbours, in families where no field says it.
    INTERLEAVED: ClassVar[bool] = False

    num_key_value_heads: Whole
    head_dim: HeadDim
    hidden_act: str = "silu"
    max_position_embeddings: Whole = 2048
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Factor = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: DropoutRate = 0.0

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        fields = super().prepare({**fields, **read_rope(fields, where)}, where)
        heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
        # Where null is stated, or nothing and the family has no default, other fields say it. Fewer key/value
        # heads are refused by the shapes of a checkpoint's tensors.
        if fields.get("num_key_value_heads", cls.default("num_key_value_heads")) is None:
            fields["num_key_value_heads"] = heads
        unstated = fields.get("head_dim", cls.default("head_dim")) is None
        if unstated and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            if hidden % heads:
                expected = f"a multiple of {heads} heads, or head_dim"
                raise BadInput(where, "hidden_size", expected=expected, found=hidden)
            fields["head_dim"] = hidden // heads
        return fields

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        heads = self.num_attention_heads
        fits = heads % self.num_key_value_heads == 0
        self.require(fits, where, "num_key_value_heads", f"a divisor of num_attention_heads={heads}")
        width = self.hidden_size // heads
        fills = self.head_dim * heads == self.hidden_size or not self.HEADS_FILL
        self.require(fills, where, "head_dim", f"hidden_size / num_attention_heads = {width}")
        for name, (_, scaling) in self.by_type.items():
            key = "rope_scaling" if name == "all" else f"rope_parameters.{name}"
            check_factors(scaling, self.rotary_dim // 2, where, key)
        self.check_layer_types(raw.get("layer_types"), where)

    def check_layer_types(self, layer_types: object, where: str) -> None:
        """Refuse a list of the blocks' types that is not true of this model."""
        kind = "full_attention" if self.window(0) is None else "sliding_attention"
        blocks = self.num_hidden_layers
        same = layer_types is None or layer_types == [kind] * blocks
        self.require(same, where, "layer_types", f"{kind} for every one of {blocks} blocks", layer_types)

    def rotation(self, number: int) -> str | None:
        return "all"

    @property
    def rotary_dim(self) -> int:
        """Return how many numbers of a head are rotated: the first ones. The others see no position."""
        return self.head_dim

    @property
    def by_type(self) -> dict[str, tuple[float, RopeScaling | None]]:
        """Return theta and scaling of each rotation, by the names that attention layers ask for."""
        return {"all": (self.rope_theta, self.rope_scaling)}

    def rotations(self) -> dict[str, RotaryEmbedding]:
        neighbours = getattr(self, "rope_interleave", self.INTERLEAVED)
        return {
            name: RotaryEmbedding(
                self.rotary_dim, theta, scaling.model_dump() if scaling else None, interleaved=neighbours
            )
            for name, (theta, scaling) in self.by_type.items()
        }


class PartialRotaryConfig(LlamaConfig):
    """List Llama's fields, and the share of each head that is rotated.

    Transformers 5 has it among the ``rope_parameters``.
    """

    partial_rotary_factor: Share = 1.0

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        fields, share = take_share(fields, where)
        return {**super().prepare(fields, where), "partial_rotary_factor": share}

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        expected = f"a share of head_dim={self.head_dim} that is an even number of it"
        even = self.rotary_dim and self.rotary_dim % 2 == 0
        self.require(even, where, "partial_rotary_factor", expected)


class NoWindowsConfig(LlamaConfig):
    """Read the keys of windows over some of the blocks, which are off in every released model.

    ``sliding_window`` alone says nothing as long as it is not used.
    """

    READ: ClassVar[frozenset[str]] = names("use_sliding_window sliding_window max_window_layers")

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        if fields.get("use_sliding_window") not in (None, False):
            expected = "false: windows over some of the blocks are not supported"
            actual = fields["use_sliding_window"]
            raise BadInput(where, "use_sliding_window", expected=expected, found=actual, todo=OTHER_WAY)
        return super().prepare(fields, where)


#: Ours -> Hugging Face's, of Llama and of what its relatives add.
LLAMA_NAMES = Names(
    "model.layers.{i}",
    {"embed": "model.embed_tokens"},
    {
        "attention.qkv.q": "self_attn.q_proj",
        "attention.qkv.k": "self_attn.k_proj",
        "attention.qkv.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "mlp.gate_up.gate": "mlp.gate_proj",
        "mlp.gate_up.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    },
    {"norm": "model.norm", "head": "lm_head"},
)


def decoder(block: type[nn.Module], base: type[CausalLM] = CausalLM, **own: Any) -> type[CausalLM]:
    """Return the class of models of these blocks; ``own``: attributes in which it is not as ``base``."""
    methods = {name: staticmethod(value) if callable(value) else value for name, value in own.items()}
    methods |= {"Block": block, "__module__": block.__module__}
    return type(block.__name__.removesuffix("Block"), (base,), methods)


class LlamaBlock(nn.Module):
    """Compute a block of Llama or SmolLM 3: a norm before each branch. Source: Touvron et al. 2023.

    x = x + attention(attention_norm(x))    * SmolLM 3: no rotation in every fourth block
    x = x + mlp(mlp_norm(x))
    """

    make_norm: ClassVar[Callable[..., nn.Module]] = staticmethod(rms_norm)
    make_attention: ClassVar[Callable[..., nn.Module]] = staticmethod(attention)
    make_mlp: ClassVar[Callable[..., nn.Module]] = staticmethod(gated_mlp)
    make_experts: ClassVar[Callable[..., nn.Module]] = staticmethod(mixture)

    def __init__(
        self, cfg: Any, number: int, state: ParallelState, **options: Unpack[AttentionOptions]
    ) -> None:
        super().__init__()
        self.attention_norm = self.make_norm(cfg, state)
        self.attention = self.make_attention(cfg, number, state, **options)
        self.mlp_norm = self.make_norm(cfg, state)
        self.mlp = (self.make_experts if cfg.has_experts(number) else self.make_mlp)(cfg, state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), inputs)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD


class DropoutBlock(LlamaBlock):
    """Compute a block of Llama's form, with dropout of what each branch adds."""

    #: The config's field of its rate.
    dropout_field: ClassVar[str] = "residual_dropout"

    def __init__(
        self, cfg: Any, number: int, state: ParallelState, **options: Unpack[AttentionOptions]
    ) -> None:
        super().__init__(cfg, number, state, **options)
        self.dropout = Dropout(getattr(cfg, self.dropout_field), state=state)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), inputs))
        x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)))
        return x_BSD


class Llama(CausalLM):
    """Compute Llama, or the stage that this pipeline rank holds."""

    config: LlamaConfig
    Block = LlamaBlock


#: Llama 2 to 3.2, and the models that are built alike.
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    LlamaConfig,
    Llama,
    LLAMA_NAMES,
)


class SmolLM3Config(NoWindowsConfig):
    """List the fields of a SmolLM 3 config.json; its blocks are Llama's.

    ``no_rope_layers``: 1 for each block that rotates its heads, 0 for one that does not.
    """

    UNPADDED: ClassVar[bool] = True

    num_key_value_heads: Whole = 4
    max_position_embeddings: Whole = 32768
    rope_theta: Factor = 2e6
    tie_word_embeddings: bool = True
    no_rope_layers: tuple[Annotated[int, Field(ge=0, le=1)], ...] = ()
    no_rope_layer_interval: Whole = 4

    def check(self, raw: Mapping[str, Any], where: str) -> None:
        super().check(raw, where)
        length, blocks = len(self.no_rope_layers), self.num_hidden_layers
        fits = not length or length >= blocks
        self.require(fits, where, "no_rope_layers", f"a number for each of {blocks} blocks", length)

    def rotation(self, number: int) -> str | None:
        rotated, interval = self.no_rope_layers, self.no_rope_layer_interval
        return "all" if (rotated[number] if rotated else (number + 1) % interval) else None

    def to_hf(self) -> dict[str, Any]:
        return {**super().to_hf(), "no_rope_layers": [*self.no_rope_layers] or None}


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", SmolLM3Config, Llama, LLAMA_NAMES)


class SeedOssConfig(LlamaConfig):
    """List the fields of a Seed-OSS config.json; its blocks have dropout.

    ``attention_bias``: on queries, keys and values; ``attention_out_bias``: on the product after attention.
    """

    UNPADDED: ClassVar[bool] = True

    num_key_value_heads: Whole = 8
    head_dim: HeadDim = 128
    max_position_embeddings: Whole = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False
    attention_dropout: DropoutRate = 0.1
    residual_dropout: DropoutRate = 0.1


class SeedOssBlock(DropoutBlock):
    """Compute a block of Seed-OSS.

    x = x + dropout(attention(attention_norm(x)))    * biases on queries, keys and values
    x = x + dropout(mlp(mlp_norm(x)))
    """

    def __init__(self, cfg: SeedOssConfig, number: int, state: ParallelState) -> None:
        super().__init__(cfg, number, state, out_bias=cfg.attention_out_bias)


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", SeedOssConfig, decoder(SeedOssBlock), LLAMA_NAMES)
