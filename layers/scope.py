"""Which tokens a token sees in one forward: those before it, in its own document."""

from __future__ import annotations

import torch
from torch import Tensor


class AttentionScope:
    """Made once a forward, from the positions, and given to every block.

    ``positions``: (B, S) or (S,), int64, of the whole sequence. They restart at 0 where a document starts,
    and a token sees its own document alone, up to itself. Rows that hold one document each (and ``None``)
    need no mask: attention is then plainly causal.
    """

    def __init__(self, positions: Tensor | None = None) -> None:
        #: (B, 1, S, S), true where a query (second to last) sees a key; ``None``: causal and nothing else.
        self.mask: Tensor | None = None
        if positions is not None and _restart(positions):
            documents_BS = documents(positions.reshape(-1, positions.shape[-1]))
            same_BSS = documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1)
            self.mask = same_BSS.tril().unsqueeze(1)


def documents(positions_BS: Tensor) -> Tensor:
    """The number of the document that each token belongs to, counted within its row: (B, S) int64."""
    return (positions_BS == 0).cumsum(1)


def _restart(positions: Tensor) -> bool:
    """Whether a row holds more than one document; on an accelerator this waits for it, once a forward.

    Where the numbers cannot be looked at (a traced or meta tensor) it is taken for granted.
    """
    if torch.compiler.is_compiling() or positions.is_meta:
        return True
    return bool((positions[..., 1:] == 0).any())
