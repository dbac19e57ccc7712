"""Compute which tokens a token sees: the earlier ones of its own document, or of a window. Positions count
from the start of the document.

B batch  S query tokens  T key tokens, of which the queries are the last
"""

import torch
from torch import Tensor

from ...parallel_state import ParallelState, engine
from ..host_numbers import on_host


def document_lengths(positions_BS: Tensor, places_S: Tensor, tokens: int, state: ParallelState) -> Tensor:
    """Return, for each token, how many tokens of its document there are up to it, (B, S) int64.

    ``places_S``: where the tokens stand in rows of ``tokens`` tokens. Over several context ranks the call is
    collective: they tell each other their positions.
    """
    starts_BS, _ = starts_and_firsts(positions_BS, None, places_S)
    all_starts, ends = starts_BS, positions_BS + 1
    if state.context.size > 1:
        all_starts, ends = (
            engine.all_gather(bounds_BS, 1, state.context.group) for bounds_BS in (starts_BS, ends)
        )
    longest = ends.new_zeros(len(ends), tokens).scatter_reduce_(1, all_starts, ends, "amax")
    return longest.gather(1, starts_BS)


def starts_and_firsts(
    positions: Tensor, window: int | None, places_S: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the places where each token's document starts, and of the first token that it sees: both (B, S).

    A token's place in its row minus its position is where its document starts, so nothing else need be known.
    ``places_S``: the default is that the tokens are the whole row.
    """
    if places_S is None:
        places_S = torch.arange(positions.shape[-1], device=positions.device)
    starts = (places_S - positions).reshape(-1, positions.shape[-1]).clamp(min=0)
    return starts, starts if window is None else torch.maximum(starts, places_S - (window - 1))


def visible_tokens(first_BS: Tensor, keys: int) -> Tensor:
    """Return (B, 1, S, T): true from a query's first key up to itself; queries are the last of ``keys``."""
    key_T = torch.arange(keys, device=first_BS.device)
    query_S1 = key_T[keys - first_BS.shape[1] :].unsqueeze(1)
    return ((key_T >= first_BS.unsqueeze(2)) & (key_T <= query_S1)).unsqueeze(1)


def exceeds(window: int | None, tokens: int) -> bool:
    """Tell whether a row of ``tokens`` tokens is longer than the window, so that the window hides some."""
    return window is not None and tokens > window


def restarts(positions: Tensor, *, wait: bool = False) -> bool:
    """Return whether a row holds more than one document.

    Numbers that the host does not have (see ``host_numbers``; traced, meta) are waited for only if told so.
    Otherwise the answer is true: attention by documents is right for one document a row as well.
    """
    host_positions = on_host(positions)
    if host_positions is None and (torch.compiler.is_compiling() or positions.is_meta or not wait):
        return True
    return bool(((positions if host_positions is None else host_positions)[..., 1:] == 0).any())
