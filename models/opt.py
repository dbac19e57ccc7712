"""OPT: GPT-2 with positions that begin at 2 and ReLU; in the 350M model norms come after the branches, and
embeddings are narrower than hidden states.
"""

from typing import Any, ClassVar, cast

from pydantic import Field
from torch import Tensor, nn

from ..layers import AttentionInputs, PositionEmbedding, ReplicatedLinear, default_positions
from ..parallel_state import ParallelState
from .base.causal_lm import CausalLM
from .base.family import Family
from .base.keys import NO, YES, ZERO, Count, DropoutRate, Fixed, Width, key
from .base.names import Names
from .base.parts import layer_norm, mlp
from .gpt2 import WholeHeadsConfig
from .llama import DropoutBlock

#: The first position's row; those before it are no token's.
OFFSET = 2
NAMES = Names(
    "model.decoder.layers.{i}",
    {
        "embed": "model.decoder.embed_tokens",
        "project_in": "model.decoder.project_in",
        "position": "model.decoder.embed_positions",
    },
    {
        "attention_norm": "self_attn_layer_norm",
        "attention.qkv.q": "self_attn.q_proj",
        "attention.qkv.k": "self_attn.k_proj",
        "attention.qkv.v": "self_attn.v_proj",
        "attention.out": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
    {
        "norm": "model.decoder.final_layer_norm",
        "norm.norm": "model.decoder.final_layer_norm",
        "norm.project": "model.decoder.project_out",
        "head": "lm_head",
    },
)


class OPTConfig(WholeHeadsConfig):
    """List the fields of an OPT config.json."""

    FIXED: ClassVar[Fixed] = {
        "_remove_final_layer_norm": NO,
        "layer_norm_elementwise_affine": YES,
        "layerdrop": ZERO,
    }
    UNPADDED: ClassVar[bool] = True

    intermediate_size: Width = key("ffn_dim")
    max_position_embeddings: Count = 2048
    word_embed_proj_dim: int = Field(gt=0, le=2**20)
    hidden_act: str = key("activation_function", default="relu")
    initializer_range: float = key("init_std", default=0.02, ge=0, le=10)
    tie_word_embeddings: bool = True
    do_layer_norm_before: bool = True
    use_bias: bool = key("enable_bias", default=True)
    residual_dropout: DropoutRate = key("dropout", default=0.1)
    attention_dropout: DropoutRate = 0.0

    @classmethod
    def prepare(cls, fields: dict[str, Any], where: str) -> dict[str, Any]:
        if fields.get("word_embed_proj_dim") is None:
            fields["word_embed_proj_dim"] = fields.get("hidden_size")
        return super().prepare(fields, where)

    @property
    def embedding_width(self) -> int:
        return self.word_embed_proj_dim

    @property
    def layer_norm_eps(self) -> float:
        return 1e-5


class ProjectedNorm(nn.Module):
    """Normalise hidden states, if the model has a last norm, and project them to the embeddings' width."""

    def __init__(self, norm: nn.Module, project: ReplicatedLinear) -> None:
        super().__init__()
        self.norm, self.project = norm, project

    def forward(self, x_BSD: Tensor) -> Tensor:
        return cast(Tensor, self.project(self.norm(x_BSD)))


class OPTBlock(DropoutBlock):
    """Compute a block of OPT or StarCoder 2. Source: Zhang et al. 2022; Lozhkov et al. 2024.

    x = x + dropout(attention(attention_norm(x)))    * biases, no rotation (StarCoder 2: a window); LayerNorm
    x = x + dropout(mlp(mlp_norm(x)))                * no gate; ReLU (StarCoder 2: GELU)
    """

    make_norm, make_mlp = staticmethod(layer_norm), staticmethod(mlp)

    def __init__(self, cfg: Any, number: int, state: ParallelState) -> None:
        super().__init__(cfg, number, state, qkv_bias=cfg.use_bias, out_bias=cfg.use_bias)


class OPTNormsAfterBlock(OPTBlock):
    """Compute a block of OPT 350M, as in Vaswani et al. 2017.

    x = attention_norm(x + dropout(attention(x)))    * a norm on the sum; LayerNorm
    x = mlp_norm(x + dropout(mlp(x)))                * no gate; ReLU
    """

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        x_BSD = self.attention_norm(x_BSD + self.dropout(self.attention(x_BSD, inputs)))
        x_BSD = self.mlp_norm(x_BSD + self.dropout(self.mlp(x_BSD)))
        return x_BSD


class OPT(CausalLM):
    """Compute OPT, or the stage that this pipeline rank holds: learned positions."""

    config: OPTConfig
    Block = OPTBlock
    make_norm = staticmethod(layer_norm)

    def block(self, number: int) -> nn.Module:
        Block = OPTBlock if self.config.do_layer_norm_before else OPTNormsAfterBlock
        return Block(self.config, number, self.state)

    def make_last_norm(self) -> nn.Module:
        """Make the last norm and the projection to the embeddings' width, where the model has them."""
        cfg = self.config
        norm = super().make_last_norm() if cfg.do_layer_norm_before else nn.Identity()
        projects, widths = self.projects, (cfg.hidden_size, cfg.word_embed_proj_dim)
        return ProjectedNorm(norm, self.linear(*widths)) if projects else norm

    @property
    def projects(self) -> bool:
        """Return whether embeddings are of another width than hidden states."""
        return self.config.word_embed_proj_dim != self.config.hidden_size

    def linear(self, width: int, out_features: int) -> ReplicatedLinear:
        """Make a linear layer from one of the two widths to the other."""
        return ReplicatedLinear(width, out_features, False, initial=self.config.initial, state=self.state)

    def add_embedding_modules(self) -> None:
        cfg = self.config
        if self.projects:
            self.project_in = self.linear(cfg.word_embed_proj_dim, cfg.hidden_size)
        rows, width = cfg.max_position_embeddings + OFFSET, cfg.hidden_size
        self.position = PositionEmbedding(rows, width, initial=cfg.initial, state=self.state)

    def embed_hook(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            positions = default_positions(x_BSD, self.state, embedded=True)
        x_BSD = self.project_in(x_BSD) if self.projects else x_BSD
        return cast(Tensor, self.position(x_BSD, positions + OFFSET))


OPT_FAMILY = Family("opt", "OPTForCausalLM", OPTConfig, OPT, NAMES, optional_prefix="model.")
