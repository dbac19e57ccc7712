"""Count the bytes that a block keeps from its forward for its backward, in each mode of checkpointing.

Each layer states its own bytes (``Cost``). Korthikanti et al. 2022 count 34 bytes times the hidden size for
each token in a block of GPT, and attention's scores as well. Here the scores are not kept (flash attention; a
CPU keeps them if attention has dropout), a gated feed-forward has a third matrix, key/value heads may be
fewer, and under sequence parallelism the gathered input of a product is kept whole, not gathered again. A
product whose weight is frozen keeps no input. For a block of Llama or GPT-2 the layers add up to:

D hidden   r ranks that share a sequence   t tensor ranks   Q, K query and key/value widths   F feed-forward

=========  =====================================================================================
none       2 D/r (inputs of the norms) + 2 D (inputs of the products) + (2 Q + 2 K)/t + 4 F/t
           (gated; 2 F/t plain) numbers; a logsumexp a head and a scale a norm in fp32
selective  D/r + (2 Q + 2 K)/t + 2 F/t (plain: F/t), and attention's part of the residual stream
full       D/r
=========  =====================================================================================

All counts are numbers for each token of one rank; with c context ranks a rank has S/c tokens of a row. With
context ranks, backward fetches keys and values again (c times 2 K/t numbers, around a ring 4 K/t) and makes
their gradients, and selective checkpointing computes attention again. It also does so if scores are bounded:
such scores are computed some rows at a time. A window that a row exceeds needs a mask: keys and values are
then as wide as queries, and attention keeps the mask as S numbers a token. Several documents in a row need a
mask too, which is not counted, because a plan does not know the data.

Experts: F is the sum of the widths of the experts that a token goes through. Each of these experts has a copy
of the token's D inputs, and D outputs. This assumes that experts are used evenly; with an uneven router the
most used rank has more. The router's scores are in fp32.

Dropout on the residual stream adds a mask for each branch. An adapter adds the r numbers between its factors
and, if its input has dropout, a copy of the input and a mask. A mask takes one byte a number on a GPU, and as
much as a number on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..layers import Checkpointing, Cost
from .step_shape import Work


@dataclass(frozen=True)
class Saved:
    """Hold the bytes of a block: ``kept`` until its backward, and ``recomputed`` (or made besides) during
    it. ``with_gradient``: the same as ``recomputed`` when the gradient of a weight is there, which is added
    to that of earlier micro-batches. ``with_all_gradients``: the same if the gradients of the block's weights
    stay until its backward ends.
    """

    kept: float
    recomputed: float
    with_gradient: float
    with_all_gradients: float


def saved_under(mode: Checkpointing, cost: Cost, work: Work) -> Saved:
    """Return what a block keeps and recomputes in this mode; a recomputed block keeps its input."""
    if mode == "none":
        with_gradient = max(cost.working, cost.with_gradient)
        return Saved(cost.kept, cost.working, with_gradient, max(with_gradient, cost.with_all_gradients))
    given = work.between_blocks  # and as many bytes are the gradient that a recomputation begins with
    own = given if cost.kept_input is None else cost.kept_input
    again = cost.kept + max(cost.working - cost.given_back, cost.making + given) - own
    with_gradient = max(again, cost.kept + cost.with_gradient - own)
    sizes = again, with_gradient, max(with_gradient, cost.kept + cost.with_all_gradients - own)
    if mode == "selective":  # what it kept is given back when the block has computed again what it is for
        return Saved(given + cost.selective, *(max(one - cost.selective, 0.0) for one in sizes))
    return Saved(given, *sizes)
