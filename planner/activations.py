"""What a block keeps from its forward for its backward, in bytes a token.

Korthikanti et al. 2022 count 34 bytes times the hidden size a token in GPT's block, and attention's scores
beside. Here the scores are not kept (flash attention; a CPU keeps them if they are dropped), a gated
feed-forward has a third matrix, key/value heads may be few, and under sequence parallelism the gathered input
of a product is kept whole, not gathered again. A product whose weight is frozen keeps no input.

Not counted is what a mask takes, that is several documents a row or a window: keys and values are then as
wide as queries, and a GPU's memory-efficient attention keeps the mask as B S S numbers a block.

D hidden   r ranks that share a sequence   t tensor ranks   Q, K query and key/value widths   F feed-forward

=========  =====================================================================================
none       2 D/r (inputs of the norms) + 2 D (inputs of the products) + (2 Q + 2 K)/t + 4 F/t
           (gated; 2 F/t plain) numbers; a logsumexp a head and a scale a norm in fp32
selective  D/r + (2 Q + 2 K)/t + 2 F/t (plain: F/t), and attention's part of the residual stream
full       D/r
=========  =====================================================================================

A token is one of those here: over c context ranks a row has S/c. There backward fetches keys and values again
(c times 2 K/t numbers, around a ring 4 K/t) and makes their gradients; selective computes attention again.

Experts: F is the width of all that a token goes through, their inputs a copy of D for each of these (as they
are evenly used; the most used rank of an uneven router has more), and so are their outputs; the router's
scores are in fp32.

Dropout on the residual stream adds a mask of each branch; an adapter the r numbers between its factors and,
where its input is dropped, a copy of that and a mask. A mask is a byte a number on a GPU, a number on a CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..layers import Checkpointing
from ..parallel_state import Coordinates, Declaration
from .step_shape import Work


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
    #: Inputs that the products keep for their weights, or for adapters that see them as they are; attention's
    #: output, which attention keeps itself, left out.
    inputs: int
    #: Norms over the hidden size, and those of them whose weights are trained.
    norms: int
    trained_norms: int
    #: Of all adapters here: widths of their inputs, and of what lies between their factors.
    adapted: int = 0
    ranks: int = 0
    #: Of a block with experts, a token: rows that its experts compute here (``feed_forward`` and ``inputs``
    #: are of all of them), and how many experts the router scores.
    routed: int = 0
    scored: int = 0


@dataclass(frozen=True)
class Kept:
    """Bytes a token: kept until backward, and needed besides while a block is in its backward."""

    kept: float
    again: float


def block_shape(
    work: Work,
    stated: Mapping[str, Declaration],
    number: int,
    at: Coordinates,
    *,
    frozen: Collection[str] = (),
) -> BlockShape:
    """Read the shape of block ``number`` off its declared weights; ``frozen`` names what has no gradient."""
    layout, config, block = work.layout, work.config, f"layers.{number}."
    own = [name for name in stated if name.startswith(block)]

    def rows(name: str) -> int:
        return stated[f"{block}{name}.weight"].box(layout, at).shape[0]

    def trained(name: str) -> bool:
        return any(
            one.startswith(f"{block}{name}.")
            and one not in frozen
            and not (work.adapter_dropout and one.endswith((".lora_A", ".lora_B")))
            for one in own
        )

    experts = f"{block}mlp.experts.up" in stated
    gated = f"{block}mlp.gate_up.gate.weight" in stated or f"{block}mlp.experts.gate" in stated
    query, heads = rows("attention.qkv.q"), config.num_attention_heads // layout.tensor
    head_dim = query // heads
    all_kv = stated[f"{block}attention.qkv.k.weight"].shape[0] // head_dim
    first, last = all_kv * at.tensor // layout.tensor, -(-all_kv * (at.tensor + 1) // layout.tensor)
    products = {"attention.qkv": config.hidden_size}
    routed = config.experts_of_token if experts else 0
    if experts:  # evenly used: as many rows on each rank as its own tokens make
        feed_forward = stated[f"{block}mlp.experts.up"].box(layout, at).shape[1] * routed
        products["mlp.experts"] = config.hidden_size * routed + feed_forward
        if f"{block}mlp.shared.down.weight" in stated:
            beside = rows("mlp.shared.gate_up.gate")
            products |= {"mlp.shared.gate_up": config.hidden_size, "mlp.shared.down": beside}
            feed_forward += beside
    else:
        feed_forward = rows("mlp.gate_up.gate" if gated else "mlp.up")
        products |= {
            "mlp.gate_up" if gated else "mlp.up": config.hidden_size,
            "mlp.down": feed_forward,
        }
    # A norm is a child of the block with one vector as its weight.
    norms = [n for n in own if n.endswith(".weight") and n.count(".") == 3 and len(stated[n].shape) == 1]
    factors = [stated[name].box(layout, at).shape for name in own if name.endswith(".lora_A")]
    return BlockShape(
        hidden=config.hidden_size,
        residual=config.hidden_size / (layout.tensor if layout.sequence else 1),
        query=query,
        key_value=(last - first) * head_dim,
        heads=heads,
        feed_forward=feed_forward,
        gated=gated,
        rms=f"{block}attention_norm.bias" not in stated,
        cut=layout.tensor > 1,
        inputs=sum(width for name, width in products.items() if trained(name)),
        norms=len(norms),
        trained_norms=sum(name not in frozen for name in norms),
        adapted=sum(width for _, width in factors),
        ranks=sum(rank for rank, _ in factors),
        routed=routed,
        scored=config.routed_experts if experts else 0,
    )


def norm_bytes(work: Work, width: float, hidden: int, *, rms: bool, trained: bool = True) -> float:
    """What a norm over ``hidden`` keeps of a token whose share here is ``width`` numbers."""
    share, inner = width / hidden, work.inner
    if not rms:
        return width * work.compute + 2 * share * inner  # input; mean and scale
    if work.fused:
        return width * work.compute + share * inner
    return (1 + trained) * width * inner + share * inner  # input and normalised input, in the norm's dtype


def kept_in_block(work: Work, shape: BlockShape, mode: Checkpointing) -> Kept:
    """Bytes a token of a block under this mode of checkpointing."""
    b, widest = work.compute, shape.residual * work.compute
    attention = (2 * shape.query + 2 * shape.key_value) * b + shape.heads * work.inner
    branches = 3 if shape.gated else 1
    norms = (
        norm_bytes(work, shape.residual, shape.hidden, rms=shape.rms, trained=number < shape.trained_norms)
        for number in range(shape.norms)
    )
    everything = (
        sum(norms)
        + shape.inputs * b
        + attention
        + branches * shape.feed_forward * b
        + _adapters(work, shape)
        + _routing(work, shape)
        + _dropout(work, shape)
    )
    # Gradients that backward holds at once: of the feed-forward's branches, or of the residual stream; where
    # it is routed, of every row.
    rows = max(1, shape.routed)
    working = max((2 * shape.feed_forward + 2 * shape.hidden * rows) * b, _fetched(work, shape))
    if mode == "none":
        return Kept(everything, working)
    if mode in ("full", "every"):
        return Kept(widest, everything - widest + working)
    sums = 2 * widest if shape.cut else _whole_products(shape) * b
    products = (2 if shape.gated else 1) * shape.feed_forward * b
    routing = shape.scored * work.inner  # the router's product; rows are brought to the experts again
    kept = widest + products + sums + shape.ranks * b + routing
    if work.layout.context > 1:  # whose attention is computed again
        return Kept(kept, everything + working - widest)
    return Kept(kept + attention, everything + working - attention - widest)


def _fetched(work: Work, shape: BlockShape) -> float:
    """In the backward of attention over several context ranks: all their keys and values or, around a ring,
    one rank's and the next one's; the gradients of these; those of the queries here.
    """
    ranks = work.layout.context
    if ranks == 1:
        return 0.0
    pieces, sums = (2, 3) if work.layout.ring else (1 + ranks, 1 + ranks)
    return 2 * shape.key_value * (pieces * work.compute + sums * work.inner) + shape.query * work.inner


def _routing(work: Work, shape: BlockShape) -> float:
    """Around the experts: the router's input and scores in fp32, their sums, what it weighs, and rows' way
    and back.
    """
    if not shape.routed:
        return 0.0
    router = (shape.hidden + 2 * shape.scored + shape.routed + 2) * work.inner
    places = 4 * 8 * shape.routed  # int64: the experts, their order, and back
    return router + shape.routed * shape.hidden * work.compute + places


def _adapters(work: Work, shape: BlockShape) -> float:
    """What lies between the factors; of a dropped input what is left of it, and the mask."""
    dropped = shape.adapted * (work.compute + work.mask) if work.adapter_dropout else 0
    return shape.ranks * work.compute + dropped


def _dropout(work: Work, shape: BlockShape) -> float:
    """Masks of both branches; on a CPU, which has no fused attention that drops, the scores thrice."""
    masks = 2 * shape.residual * work.mask if getattr(work.config, "resid_pdrop", 0.0) else 0.0
    if work.fused or work.layout.context > 1 or not attention_drops(work):
        return masks
    repeated = 2 * (shape.query - shape.key_value)  # key/value heads, one for each query head
    return masks + (3 * shape.heads * work.sequence_length + repeated) * work.compute


def attention_drops(work: Work) -> bool:
    """Whether attention's weights are dropped; families name it after Hugging Face's configs."""
    return any(getattr(work.config, name, 0.0) for name in ("attn_pdrop", "attention_dropout"))


def _whole_products(shape: BlockShape) -> int:
    """On one tensor rank, the products back into the residual stream that start from the hidden width."""
    return sum(shape.hidden for width in (shape.query, shape.feed_forward) if width == shape.hidden)
