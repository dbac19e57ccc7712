"""What a block keeps from its forward for its backward under each mode of checkpointing, in bytes.

Its layers say it (``Cost``). Korthikanti et al. 2022 count 34 bytes times the hidden size a token in GPT's
block, and attention's scores beside. Here the scores are not kept (flash attention; a CPU keeps them if they
are dropped), a gated feed-forward has a third matrix, key/value heads may be few, and under sequence
parallelism the gathered input of a product is kept whole, not gathered again. A product whose weight is
frozen keeps no input. For a block of Llama or GPT-2 the layers add up to:

D hidden   r ranks that share a sequence   t tensor ranks   Q, K query and key/value widths   F feed-forward

=========  =====================================================================================
none       2 D/r (inputs of the norms) + 2 D (inputs of the products) + (2 Q + 2 K)/t + 4 F/t
           (gated; 2 F/t plain) numbers; a logsumexp a head and a scale a norm in fp32
selective  D/r + (2 Q + 2 K)/t + 2 F/t (plain: F/t), and attention's part of the residual stream
full       D/r
=========  =====================================================================================

All counts are for the tokens of one rank; with c context ranks a row has S/c of them. There backward fetches
keys and values again (c times 2 K/t numbers, around a ring 4 K/t) and makes their gradients; selective
computes attention again. So it does with bounded scores, which are written out some rows at a time. A window
that a row exceeds needs a mask: keys and values are then as wide as queries, and attention keeps the mask as
S numbers a token. Several documents a row need one too, which is not counted: a plan does not know the data.

Experts: F is the width of all that a token goes through, their inputs a copy of D for each of these (as they
are evenly used; the most used rank of an uneven router has more), and so are their outputs; the router's
scores are in fp32.

Dropout on the residual stream adds a mask of each branch; an adapter the r numbers between its factors and,
where its input is dropped, a copy of that and a mask. A mask is a byte a number on a GPU, a number on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..layers import Checkpointing, Cost, checkpointed
from .step_shape import Work


@dataclass(frozen=True)
class Saved:
    """Hold the bytes of a block: ``kept`` until its backward, and ``recomputed`` (or made besides) during
    it.
    """

    kept: float
    recomputed: float


def saved_in_block(work: Work, cost: Cost, number: int) -> Saved:
    """Return what block ``number`` keeps and recomputes under the step's mode of checkpointing."""
    forgets = checkpointed(number, work.checkpointing, work.checkpoint_every)
    return saved_under(work.checkpointing if forgets else "none", cost, work)


def saved_under(mode: Checkpointing, cost: Cost, work: Work) -> Saved:
    """Return what a block keeps and recomputes in this mode; a recomputed block keeps its input."""
    given = work.tokens.between_blocks(work.state).bytes(work.hidden)
    if mode == "none":
        return Saved(cost.kept, cost.working)
    if mode == "selective":
        return Saved(given + cost.selective, cost.kept - cost.both - given + cost.working)
    return Saved(given, cost.kept - given + cost.working)
