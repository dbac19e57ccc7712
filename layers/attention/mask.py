"""Decide which tokens each query of a forward sees: earlier ones of its document, also those in a cache.

B batch  S tokens of this forward  T tokens so far  K key/value heads here  E head dim
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...parallel_state import ParallelState, alone_or
from .backends import Backend
from .flex import block_mask
from .kernel_checks import is_right
from .key_value_cache import KeyValueCache
from .ring_and_gathered_attention import ContextScope
from .varlen import sequences_of
from .visible import exceeds, restarts, starts_and_firsts, visible_tokens

T = TypeVar("T")


class AttentionScope:
    """State which keys each query of a forward may see; made once from the positions, for every block.

    ``positions``: (B, S) or (S,), int64, of the whole sequence. They restart at 0 where a document starts. A
    token sees only its own document, up to itself. If each row is one document (or ``positions`` is
    ``None``), no mask is needed and attention is plainly causal. With a ``cache``, ``positions`` (B, S)
    belong to the tokens that follow the cached ones. With a ``window`` a token sees that many tokens, itself
    included, and positions are required (Beltagy et al. 2020).

    A mask has one form for each backend (``takes``), which is made when it is first asked for, and kept.

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
            later = 0 < cache.start < cache.used - 1  # several tokens that follow others
            self._packed = cache.packed
            self.masked = self._packed or later or exceeds(window, cache.used)
            self.causal = cache.start == 0 and not self.masked
        elif self._positions is not None:
            self._packed = restarts(self._positions)
            self.masked = self._packed or exceeds(window, self._positions.shape[1])
            self.causal = not self.masked

    @property
    def cached(self) -> bool:
        """Return whether the queries follow the keys of a cache."""
        return self._cache is not None

    def takes(self, backend: Backend, q_BHSE: Tensor) -> Any:
        """Return what ``backend`` takes for queries like ``q``, of which only shape, dtype and device count.

        It is the documents of all rows as sequences (varlen), the blocks of keys that each block of queries
        needs (flex), the mask and whether torch's fused operators may compute blocks (blockwise, and over
        context ranks, without a mask), or the mask as what is added to scores: 0, or minus infinity.
        """
        (batch, _, length, width), device, dtype = q_BHSE.shape, q_BHSE.device, q_BHSE.dtype
        like = device, dtype, width
        if self.context is not None:
            return is_right("blocks", *like, self._state)
        if backend == "varlen":
            positions = self._positions if self._packed else None
            return self._once("varlen", lambda: sequences_of(positions, batch, length, device, self._window))
        if backend == "flex":
            here = torch.arange(length, device=device) if self._positions is None else self._positions
            return self._once("flex", lambda: block_mask(starts_and_firsts(here, self._window)[1]))
        if backend == "blockwise":
            return self.mask, self._once(like, lambda: is_right("blocks", *like, self._state))
        return self._once(dtype, lambda: self._numbers(dtype)) if self.masked else None

    @property
    def mask(self) -> Tensor | None:
        """Return (B, 1, S, T), true where a query sees a key; ``None`` if it sees all earlier keys."""
        return self._once("mask", self._dense) if self.masked else None

    def places(self, q_BHSE: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the places of queries (S,) and keys (T,) in their row, and those where the queries'
        documents start, (B or 1, S); ``None``: all start with the row.
        """
        start = 0 if self._cache is None else self._cache.start
        keys = torch.arange(start + q_BHSE.shape[2], device=q_BHSE.device)
        if self._positions is None or not self._packed:
            return keys[start:], keys, None
        return keys[start:], keys, starts_and_firsts(self._positions, None, keys[start:])[0]

    def extend(self, block: nn.Module, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the queries meet in ``block``: the cached ones and these."""
        return (k_BKSE, v_BKSE) if self._cache is None else self._cache.extend(block, k_BKSE, v_BKSE)

    def _once(self, form: object, make: Callable[[], T]) -> T:
        if form not in self._made:
            self._made[form] = make()
        made: T = self._made[form]
        return made

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        mask = self._made.get("mask")
        mask = self._dense() if mask is None else mask
        return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))

    def _dense(self) -> Tensor:
        assert self._positions is not None, "without positions nothing is hidden"
        start = 0 if self._cache is None else self._cache.start
        keys = start + self._positions.shape[1]
        places = torch.arange(start, keys, device=self._positions.device)
        return visible_tokens(starts_and_firsts(self._positions, self._window, places)[1], keys)
