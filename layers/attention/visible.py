"""Compute which tokens a token sees: the earlier ones of its own document, or of a window.

B batch  S query tokens  T key tokens, of which the queries are the last
"""

import torch
from torch import Tensor

from ...parallel_state import ParallelState, engine
from ..host_numbers import on_host


def documents(positions_BS: Tensor) -> Tensor:
    """Return the number of the document that each token belongs to, counted within its row: (B, S) int64."""
    return (positions_BS == 0).cumsum(1)


def document_lengths(positions_BS: Tensor, places_S: Tensor, tokens: int, state: ParallelState) -> Tensor:
    """Count the tokens so far of the document of each token, (B, S) int64.

    ``places_S``: where the tokens stand in rows of so many ``tokens``. Over several context ranks the call is
    collective: they tell each other their positions.
    """
    starts_BS = places_S - positions_BS
    all_starts, ends = starts_BS, positions_BS + 1
    if state.context.size > 1:
        all_starts, ends = (
            engine.all_gather(bounds_BS, 1, state.context.group) for bounds_BS in (starts_BS, ends)
        )
    longest = ends.new_zeros(len(ends), tokens).scatter_reduce_(1, all_starts, ends, "amax")
    return longest.gather(1, starts_BS)


def visible_tokens(queries_BS: Tensor, keys_BT: Tensor, window: int | None) -> Tensor:
    """Return a mask (B, 1, S, T), true where a query sees a key, from the numbers of their documents."""
    same_BST, first = queries_BS.unsqueeze(2) == keys_BT.unsqueeze(1), keys_BT.shape[1] - queries_BS.shape[1]
    seen_BST = same_BST.tril(first)
    if window is not None:
        seen_BST = seen_BST.triu(first - window + 1)
    return seen_BST.unsqueeze(1)


def exceeds(window: int | None, tokens: int) -> bool:
    """Return whether a row of so many tokens is longer than the window, so that the window hides some."""
    return window is not None and tokens > window


def restarts(positions: Tensor, *, wait: bool = False) -> bool:
    """Return whether a row holds more than one document.

    Numbers that the host does not have (see ``host_numbers``; traced, meta) are waited for only if told so.
    Otherwise the answer is true: attention by documents is right for one document a row as well.
    """
    here = on_host(positions)
    if here is None and (torch.compiler.is_compiling() or positions.is_meta or not wait):
        return True
    return bool(((positions if here is None else here)[..., 1:] == 0).any())
