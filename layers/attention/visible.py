"""Which tokens a token sees: those before it in its own document, or in a window of them.

B batch  S query tokens  T key tokens, of which the queries are the last
"""

from __future__ import annotations

import torch
from torch import Tensor


def documents(positions_BS: Tensor) -> Tensor:
    """Return the number of the document that each token belongs to, counted within its row: (B, S) int64."""
    return (positions_BS == 0).cumsum(1)


def visible_tokens(queries_BS: Tensor, keys_BT: Tensor, window: int | None) -> Tensor:
    """Return a mask (B, 1, S, T), true where a query sees a key, from the numbers of their documents."""
    same_BST, first = queries_BS.unsqueeze(2) == keys_BT.unsqueeze(1), keys_BT.shape[1] - queries_BS.shape[1]
    seen_BST = same_BST.tril(first)
    if window is not None:
        seen_BST = seen_BST.triu(first - window + 1)
    return seen_BST.unsqueeze(1)


def exceeds(window: int | None, tokens: int) -> bool:
    """Whether so many tokens are more than the window lets a token see."""
    return window is not None and tokens > window


def restarts(positions: Tensor) -> bool:
    """Whether a row holds more than one document; on an accelerator this waits for it, once a forward.

    Where the numbers cannot be looked at (a traced or meta tensor) it is taken for granted.
    """
    if torch.compiler.is_compiling() or positions.is_meta:
        return True
    return bool((positions[..., 1:] == 0).any())
