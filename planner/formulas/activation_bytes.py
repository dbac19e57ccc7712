"""Compute the bytes that a block of GPT keeps for its backward, by the textbook's closed form.

The plan of a run does not use it: it adds up what each layer states (``planner.activations``), which is
exact for every family. The closed form is for a calculation by hand. It holds for 16-bit activations, a
feed-forward of four times the hidden size with GELU, dropout, and scores that are written out.
Source: Korthikanti et al. 2022, table 2.
"""

from __future__ import annotations

from typing import Literal

Recompute = Literal["none", "selective", "full"]


def block_activation_bytes(
    tokens: float,
    hidden: int,
    *,
    heads: int = 0,
    sequence_length: int = 0,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Return the bytes that a rank keeps of one block for ``tokens``, sequence times micro-batch.

    34 bytes for each token and hidden number: 10 that only sequence parallelism cuts (the inputs of norms
    and products, masks of dropout), and 24 that tensor parallelism cuts. Scores take ``5 * heads *
    sequence_length`` bytes a token; ``selective`` and flash attention compute them again. ``full`` keeps the
    block's input.
    """
    shared = tensor if sequence_parallel else 1
    if recompute == "full":
        return 2 * tokens * hidden / shared
    products = tokens * hidden * (10 / shared + 24 / tensor)
    scores = 5 * tokens * heads * sequence_length / tensor
    return products + (scores if recompute == "none" else 0)
