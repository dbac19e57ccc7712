"""Make layers from the fields that configs share; ``options`` are a layer's own words for the rest."""

from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack

from torch import nn

from ...layers import (
    MLP,
    Alibi,
    Attention,
    Experts,
    GatedMLP,
    GatedShared,
    HeadsLayerNorm,
    LayerNorm,
    MoE,
    RMSNorm,
    TopKRouter,
)
from ...parallel_state import Initial, ParallelState

#: Makes a norm of queries or of keys from their number of heads.
HeadNorm = Callable[[int], nn.Module]


def rms_norm(cfg: Any, state: ParallelState, *, offset: float = 0.0) -> RMSNorm:
    """Make a norm over hidden states; ``offset``: its weights count from there (Gemma: 1)."""
    return RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, offset=offset, state=state)


def layer_norm(cfg: Any, state: ParallelState, *, bias: bool = True) -> LayerNorm:
    """Make a LayerNorm over hidden states."""
    return LayerNorm(cfg.hidden_size, cfg.layer_norm_eps, bias=bias, state=state)


def head_rms_norm(cfg: Any, state: ParallelState, *, offset: float = 0.0) -> HeadNorm:
    """Return what makes the norm of each head of queries and keys, with one weight for all (Qwen 3)."""
    return lambda heads: RMSNorm(cfg.head_dim, cfg.rms_norm_eps, offset=offset, heads=True, state=state)


def head_layer_norm(cfg: Any, state: ParallelState) -> HeadNorm:
    """Return what makes the LayerNorm of each head of queries and keys, with weights of its own (Cohere)."""
    return lambda heads: HeadsLayerNorm(heads, cfg.head_dim, cfg.layer_norm_eps, state=state)


class AttentionOptions(TypedDict, total=False):
    """Name what ``attention`` takes besides the config; ``Attention`` explains it."""

    qkv_bias: bool
    out_bias: bool
    qk_norm: HeadNorm | None
    scale: float | None
    soft_cap: float | None
    sinks: bool
    alibi: Alibi | None
    gated: bool
    out_initial: Initial


def attention(cfg: Any, number: int, state: ParallelState, **options: Unpack[AttentionOptions]) -> Attention:
    """Make the attention of block ``number``: heads, dropout, rotation and window are the config's, and so
    are the biases where nothing else is said.
    """
    biased = getattr(cfg, "attention_bias", False)
    options.setdefault("qkv_bias", biased)
    options.setdefault("out_bias", biased)
    return Attention(
        cfg.hidden_size,
        heads=cfg.num_attention_heads,
        kv_heads=getattr(cfg, "num_key_value_heads", None),
        head_dim=cfg.head_dim,
        rotary=cfg.rotation(number),
        window=cfg.window(number),
        dropout=getattr(cfg, "attention_dropout", 0.0),
        initial=cfg.initial,
        state=state,
        **options,
    )


def mlp(cfg: Any, state: ParallelState, *, out_initial: Initial | None = None) -> MLP:
    """Make a feed-forward without a gate (GPT-2)."""
    sizes, act, starts = (cfg.hidden_size, cfg.intermediate_size), cfg.hidden_act, cfg.initial
    bias = getattr(cfg, "use_bias", True)
    return MLP(*sizes, act=act, bias=bias, initial=starts, out_initial=out_initial, state=state)


def gated_mlp(cfg: Any, state: ParallelState, width: int | None = None, *, entered: bool = False) -> GatedMLP:
    """Make a feed-forward with a gate (Llama); ``width`` in place of the config's ``intermediate_size``."""
    bias, starts = getattr(cfg, "mlp_bias", False), cfg.initial
    width, act = width or cfg.intermediate_size, cfg.hidden_act
    return GatedMLP(cfg.hidden_size, width, act=act, bias=bias, entered=entered, initial=starts, state=state)


class RouterOptions(TypedDict, total=False):
    """Name what ``router`` takes besides the config; ``TopKRouter`` explains it."""

    score: Literal["softmax", "sigmoid"]
    normalize: bool
    scale: float
    groups: int
    groups_kept: int
    biased: bool
    bias_corrected: bool


def router(cfg: Any, state: ParallelState, **options: Unpack[RouterOptions]) -> TopKRouter:
    """Make a router, with the config's number of experts and loss of balance."""
    sizes, balance = (cfg.hidden_size, cfg.num_local_experts, cfg.num_experts_per_tok), cfg.balance_factor
    return TopKRouter(*sizes, balance=balance, initial=cfg.initial, state=state, **options)


def mixture(
    cfg: Any,
    state: ParallelState,
    width: int | None = None,
    *,
    shared: GatedMLP | GatedShared | None = None,
    **options: Unpack[RouterOptions],
) -> MoE:
    """Make the experts of a block, each ``width`` wide inside (``intermediate_size``), behind a router."""
    act, experts, width = cfg.hidden_act, cfg.num_local_experts, width or cfg.intermediate_size
    chosen_by = router(cfg, state, **options)
    stack = Experts(experts, cfg.hidden_size, width, act=act, initial=cfg.initial, state=state)
    return MoE(chosen_by, stack, shared=shared, state=state)
