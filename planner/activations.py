"""What a block keeps from its forward for its backward, in bytes a token.

Korthikanti et al. 2022 count 34 bytes times the hidden size a token in GPT's block, and attention's scores
beside. Here the scores are never kept (flash attention), a gated feed-forward has a third matrix, key/value
heads may be few, and under sequence parallelism the gathered input of a product is kept whole, not gathered
again. Dropout's masks are not counted.

D hidden   r ranks that share a sequence   t tensor ranks   Q, K query and key/value widths   F feed-forward

=========  =====================================================================================
none       2 D/r (inputs of the norms) + 2 D (inputs of the products) + (2 Q + 2 K)/t + 4 F/t
           (gated; 2 F/t plain) numbers; a logsumexp a head and a scale a norm in fp32
selective  D/r + (2 Q + 2 K)/t + 2 F/t (plain: F/t), and attention's part of the residual stream
full       D/r
=========  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..layers import Checkpointing
from ..parallel_state import Coordinates, Declaration
from .work import Work


@dataclass(frozen=True)
class BlockShape:
    """Widths of one block on one rank: numbers a token of the whole sequence."""

    hidden: int
    #: Of the residual stream here: hidden, or a piece of it a token under sequence parallelism.
    residual: float
    query: int
    key_value: int
    heads: int
    feed_forward: int
    gated: bool
    rms: bool
    cut: bool


@dataclass(frozen=True)
class Kept:
    """Bytes a token: kept until backward, and needed besides while a block is in its backward."""

    kept: float
    again: float


def block_shape(work: Work, stated: Mapping[str, Declaration], number: int, at: Coordinates) -> BlockShape:
    """Read the shape of block ``number`` off its declared weights."""
    layout, config = work.layout, work.config

    def rows(name: str) -> int:
        return stated[f"layers.{number}.{name}.weight"].box(layout, at).shape[0]

    gated = f"layers.{number}.mlp.gate_up.gate.weight" in stated
    query, heads = rows("attention.qkv.q"), config.num_attention_heads // layout.tensor
    head_dim = query // heads
    all_kv = stated[f"layers.{number}.attention.qkv.k.weight"].shape[0] // head_dim
    first, last = all_kv * at.tensor // layout.tensor, -(-all_kv * (at.tensor + 1) // layout.tensor)
    return BlockShape(
        hidden=config.hidden_size,
        residual=config.hidden_size / (layout.tensor if layout.sequence else 1),
        query=query,
        key_value=(last - first) * head_dim,
        heads=heads,
        feed_forward=rows("mlp.gate_up.gate" if gated else "mlp.up"),
        gated=gated,
        rms=f"layers.{number}.attention_norm.bias" not in stated,
        cut=layout.tensor > 1,
    )


def norm_bytes(work: Work, width: float, hidden: int, *, rms: bool) -> float:
    """What a norm over ``hidden`` keeps of a token whose share here is ``width`` numbers."""
    share, inner = width / hidden, work.inner
    if not rms:
        return width * work.compute + 2 * share * inner  # input; mean and scale
    if work.fused_norm:
        return width * work.compute + share * inner
    return 2 * width * inner + share * inner  # input and normalised input, in the norm's own dtype


def kept_in_block(work: Work, shape: BlockShape, mode: Checkpointing) -> Kept:
    """Bytes a token of a block under this mode of checkpointing."""
    b, widest = work.compute, shape.residual * work.compute
    attention = (2 * shape.query + 2 * shape.key_value) * b + shape.heads * work.inner
    branches = 4 if shape.gated else 2
    everything = (
        2 * norm_bytes(work, shape.residual, shape.hidden, rms=shape.rms)
        + 2 * shape.hidden * b
        + attention
        + branches * shape.feed_forward * b
    )
    # Gradients that backward holds at once: of the feed-forward's branches, or of the residual stream.
    working = (2 * shape.feed_forward + 2 * shape.hidden) * b
    if mode == "none":
        return Kept(everything, working)
    if mode in ("full", "every"):
        return Kept(widest, everything - widest + working)
    sums = 2 * widest if shape.cut else _whole_products(shape) * b
    kept = widest + attention + (2 if shape.gated else 1) * shape.feed_forward * b + sums
    return Kept(kept, everything + working - attention - widest)


def _whole_products(shape: BlockShape) -> int:
    """On one tensor rank, the products back into the residual stream that start from the hidden width."""
    return sum(shape.hidden for width in (shape.query, shape.feed_forward) if width == shape.hidden)
