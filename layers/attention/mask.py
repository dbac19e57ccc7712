"""Decide which tokens each query of a forward sees: earlier ones of its document, also those in a cache.

B batch  S tokens of this forward  T tokens so far  K key/value heads here  E head dim
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...parallel_state import ParallelState
from .context_mask import ContextScope
from .key_value_cache import KeyValueCache
from .visible import documents, exceeds, restarts, visible_tokens


class AttentionScope:
    """State which keys each query of a forward pass may see; made once from the positions and given to every
    block.

    ``positions``: (B, S) or (S,), int64, of the whole sequence. They restart at 0 where a document starts. A
    token sees only its own document, up to itself. If each row is one document (or ``positions`` is
    ``None``), no mask is needed and attention is plainly causal. With a ``cache``, ``positions`` (B, S)
    belong to the tokens that follow the cached ones. With a ``window`` a token sees that many tokens, itself
    included, and positions are required (Beltagy et al. 2020).

    If ``state`` has several context ranks, tokens and positions are this rank's chunks of the sequence (see
    ``cut_sequence``), keys and values are fetched from the other ranks, and a cache is not possible.
    """

    def __init__(
        self,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        window: int | None = None,
        state: ParallelState | None = None,
    ) -> None:
        assert window is None or positions is not None, "a window needs positions"
        #: (B, 1, S, T), true where a query (second to last) sees a key; ``None``: it sees all before it.
        self.mask: Tensor | None = None
        #: True if keys and queries are the same tokens, and causality alone decides.
        self.causal = True
        #: The scope over several context ranks; ``None``: the whole sequence is on this rank.
        self.context: ContextScope | None = None
        self._cache, self._positions = cache, positions
        if state is not None and state.context_size > 1:
            assert cache is None, "a cache holds whole sequences, not a context rank's chunks"
            self.context = ContextScope(positions, window=window, state=state)
        elif cache is not None:
            self.mask = cache.mask(window)
            self.causal = cache.start == 0 and self.mask is None
        elif positions is not None and (exceeds(window, positions.shape[-1]) or restarts(positions)):
            documents_BS = documents(positions.reshape(-1, positions.shape[-1]))
            self.mask, self.causal = visible_tokens(documents_BS, documents_BS, window), False

    def positions(self, q_BHSE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of the queries, (B or 1, S), and of the keys, (B or 1, T)."""
        if self._positions is None:
            here = torch.arange(q_BHSE.shape[2], device=q_BHSE.device).unsqueeze(0)
        else:
            here = self._positions.reshape(-1, self._positions.shape[-1])
        return here, here if self._cache is None else self._cache.positions

    def extend(self, block: nn.Module, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that this forward's queries meet in ``block``: the cached ones and
        these.
        """
        return (k_BKSE, v_BKSE) if self._cache is None else self._cache.extend(block, k_BKSE, v_BKSE)
