"""Decide which tokens each query of a forward sees: earlier ones of its document, also those in a cache.

B batch  S tokens of this forward  T tokens so far  K key/value heads here  E head dim
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ...parallel_state import ParallelState, alone_or
from .backends import Backend
from .flex import block_mask
from .kernel_checks import is_right
from .key_value_cache import KeyValueCache
from .ring_and_gathered_attention import ContextScope
from .varlen import Sequences, sequences_of
from .visible import documents, exceeds, restarts, visible_tokens


class AttentionScope:
    """State which keys each query of a forward pass may see; made once from the positions and given to every
    block.

    ``positions``: (B, S) or (S,), int64, of the whole sequence. They restart at 0 where a document starts. A
    token sees only its own document, up to itself. If each row is one document (or ``positions`` is
    ``None``), no mask is needed and attention is plainly causal. With a ``cache``, ``positions`` (B, S)
    belong to the tokens that follow the cached ones. With a ``window`` a token sees that many tokens, itself
    included, and positions are required (Beltagy et al. 2020).

    A mask has one form for each backend: ``mask``, ``bias``, ``sequences``, ``block_mask``. Each is made when
    it is first asked for, and kept; ``prepare`` makes it before the blocks.

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
        #: Whether documents or a window hide keys that causality alone would show.
        self.masked = False
        #: True if keys and queries are the same tokens, and causality alone decides.
        self.causal = True
        #: The scope over several context ranks; ``None``: the whole sequence is on this rank.
        self.context: ContextScope | None = None
        self._cache, self._window, self._packed = cache, window, False
        self._state = alone_or(state)
        self._positions = None if positions is None else positions.reshape(-1, positions.shape[-1])
        self._made: dict[object, Any] = {}
        if state is not None and state.context.size > 1:
            assert cache is None, "a cache holds whole sequences, not a context rank's chunks"
            self.context = ContextScope(positions, window=window, state=state)
        elif cache is not None:
            self._made["mask"] = cache.mask(window)
            self.masked = self._made["mask"] is not None
            self.causal = cache.start == 0 and not self.masked
        elif self._positions is not None:
            self._packed = restarts(self._positions)
            self.masked = self._packed or exceeds(window, self._positions.shape[1])
            self.causal = not self.masked

    @property
    def cached(self) -> bool:
        """Return whether the queries follow the keys of a cache."""
        return self._cache is not None

    def prepare(self, backend: Backend, q_BHSE: Tensor, width: int) -> None:
        """Make what ``backend`` takes for queries with heads of ``width`` like ``q``, of which only shape,
        dtype and device count.
        """
        if self.context is not None:
            self.context.fused(q_BHSE, width)
        elif backend == "varlen":
            self.sequences(q_BHSE)
        elif backend == "flex":
            self.block_mask(q_BHSE)
        elif backend == "blockwise":
            _ = self.fused(q_BHSE, width), self.mask
        else:
            self.bias(q_BHSE.dtype)

    @property
    def mask(self) -> Tensor | None:
        """Return (B, 1, S, T), true where a query sees a key; ``None`` if it sees all earlier keys."""
        return self._once("mask", self._dense) if self.masked else None

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the mask as what is added to scores: 0, or minus infinity."""
        return cast(Tensor, self._once(dtype, lambda: self._numbers(dtype))) if self.masked else None

    def sequences(self, q_BHSE: Tensor) -> Sequences:
        """Return the documents of all rows as sequences that follow each other."""
        batch, _, length, _ = q_BHSE.shape
        positions, device = self._positions if self._packed else None, q_BHSE.device
        made = self._once("sequences", lambda: sequences_of(positions, batch, length, device, self._window))
        return cast(Sequences, made)

    def fused(self, q_BHSE: Tensor, width: int = 0) -> bool:
        """Return whether torch's fused operators may compute blocks of attention, see ``kernel_checks``;
        ``width``: the head dim, if ``q`` is only a stand-in.
        """
        like, width = (q_BHSE.device, q_BHSE.dtype), width or q_BHSE.shape[-1]
        right = self._once((*like, width), lambda: is_right("blocks", *like, width, self._state))
        return bool(right)

    def block_mask(self, q_BHSE: Tensor) -> BlockMask:
        """Return the blocks of keys that each block of queries needs."""
        return cast(BlockMask, self._once("blocks", lambda: block_mask(self._first(q_BHSE))))

    def positions(self, q_BHSE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of the queries, (B or 1, S), and of the keys, (B or 1, T)."""
        here = self._positions
        if here is None:
            here = torch.arange(q_BHSE.shape[2], device=q_BHSE.device).unsqueeze(0)
        return here, here if self._cache is None else self._cache.positions

    def extend(self, block: nn.Module, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that this forward's queries meet in ``block``: the cached ones and
        these.
        """
        return (k_BKSE, v_BKSE) if self._cache is None else self._cache.extend(block, k_BKSE, v_BKSE)

    def _once(self, form: object, make: Callable[[], Any]) -> Any:
        if form not in self._made:
            self._made[form] = make()
        return self._made[form]

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        mask = self._made.get("mask")
        mask = self._dense() if mask is None else mask
        return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))

    def _dense(self) -> Tensor:
        assert self._positions is not None, "without positions nothing is hidden"
        documents_BS = documents(self._positions)
        return visible_tokens(documents_BS, documents_BS, self._window)

    def _first(self, q_BHSE: Tensor) -> Tensor:
        """Return the place of the first token that each token sees: (B, S), or (1, S) for all rows alike."""
        places = torch.arange(q_BHSE.shape[2], device=q_BHSE.device)
        first = torch.zeros_like(places).unsqueeze(0)
        if self._packed and self._positions is not None:
            first = torch.where(self._positions == 0, places, 0).cummax(1).values
        if self._window is not None:
            first = torch.maximum(first, places - (self._window - 1))
        return first
