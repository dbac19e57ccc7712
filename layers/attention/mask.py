"""Decide which tokens each query of a forward sees: earlier ones of its document, also those in a cache.

B batch  S tokens of this forward  T tokens so far  K key/value heads here  E head dim
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...parallel_state import ParallelState, alone_or
from ..context_chunks import own_chunks, token_places
from ..host_numbers import on_host
from .backends import Backend
from .blockwise import BlockAttentionOptions
from .flex import block_mask
from .kernel_checks import is_right
from .key_value_cache import KeyValueCache
from .scores import Alibi
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
    ``cut_sequence``), keys and values are fetched from the other ranks, whose positions need not be known,
    and a cache is not possible.
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
        self.state, self._cache, self._window = alone_or(state), cache, window
        self.over_context = self.state.context.size > 1
        assert cache is None or not self.over_context, "a cache holds whole sequences, not chunks of a rank"
        self._positions = None if positions is None else positions.reshape(-1, positions.shape[-1])
        #: The place in its row of the first token of this forward.
        self._start = 0 if cache is None else cache.start
        self._made: dict[object, Any] = {}
        #: Over context ranks the lowest and the highest place that tokens of each chunk see first.
        self._bounds: Sequence[Sequence[int]] = [(0, 0)] * 2
        self._packed, tokens = False, 0
        if cache is not None:
            self._packed, tokens = cache.packed, cache.used
        elif self._positions is not None and self.over_context:
            self._bounds = self._bounds_of_chunks(self._positions)
        elif self._positions is not None:
            self._packed, tokens = restarts(self._positions), self._positions.shape[1]
        later = 0 < self._start < tokens - 1  # several tokens that follow others
        #: Whether documents or a window hide keys that causality alone would show.
        self.masked = self._packed or later or exceeds(window, tokens)

    @property
    def causal(self) -> bool:
        """Return whether keys and queries are the same tokens, and causality alone decides."""
        return self._start == 0 and not self.masked

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
        if self.over_context:
            return is_right("blocks", *like)
        if backend == "varlen":
            positions = self._positions if self._packed else None
            return self._once("varlen", lambda: sequences_of(positions, batch, length, device, self._window))
        if backend == "flex":
            row = torch.zeros(1, length, dtype=torch.int64, device=device)
            return self._once("flex", lambda: block_mask(row if self._positions is None else self._firsts[1]))
        if backend == "blockwise":
            return self.mask, self._once(like, lambda: is_right("blocks", *like))
        return self._once(dtype, lambda: self._numbers(dtype)) if self.masked else None

    @property
    def mask(self) -> Tensor | None:
        """Return (B, 1, S, T), true where a query sees a key; ``None`` if it sees all earlier keys."""
        return self._once("mask", self._dense) if self.masked else None

    def places(self, q_BHSE: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the places of queries (S,) and keys (T,) in their row, and those where the queries'
        documents start, (B or 1, S); ``None``: all start with the row.
        """
        keys = torch.arange(self._start + q_BHSE.shape[2], device=q_BHSE.device)
        return keys[self._start :], keys, self._firsts[0] if self._packed else None

    def blocks(
        self, source: int, chunk: int, settings: BlockAttentionOptions, alibi: Alibi | None = None
    ) -> Iterator[tuple[slice, slice, BlockAttentionOptions]]:
        """Yield the blocks that this rank computes with the keys of context rank ``source``: the rows of
        queries and of keys, and the options, with what a query sees and a dropout seed of the block's own.

        A block is one of this rank's two chunks of queries and one of the other's two chunks of keys;
        ``chunk``: tokens in each. Those that causality, documents or a window leave empty are skipped.
        """
        size, index = self.state.context.size, self.state.context.index
        # The later chunk of keys first: a query's first block then contains the query's own key.
        for key, keys in reversed([*enumerate(own_chunks(source, size))]):
            begin, key_rows = keys * chunk, slice(key * chunk, (key + 1) * chunk)
            for query, queries in enumerate(own_chunks(index, size)):
                rows = slice(query * chunk, (query + 1) * chunk)
                low, last = self._bounds[query]
                if keys > queries or low >= begin + chunk:
                    continue
                causal, mask, bias = keys == queries, None, None
                if alibi is not None:
                    offsets = torch.arange(chunk, device=self.state.device)
                    starts = self._firsts[0][:, rows] if last else None
                    bias = alibi.bias(queries * chunk + offsets, begin + offsets, starts)
                if last > begin:  # it begins before what some query sees first
                    firsts = self._firsts[1][:, None, rows, None]
                    mask = begin + torch.arange(chunk, device=firsts.device) >= firsts
                    mask = mask.tril() if causal else mask
                seed = (settings.seed + 4 * source + 2 * query + key) % 2**63
                options = replace(settings, causal=causal, mask=mask, seed=seed, bias=bias)
                yield rows, key_rows, options

    def extend(self, block: nn.Module, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the queries meet in ``block``: the cached ones and these."""
        return (k_BKSE, v_BKSE) if self._cache is None else self._cache.extend(block, k_BKSE, v_BKSE)

    def _once(self, form: object, make: Callable[[], T]) -> T:
        if form not in self._made:
            self._made[form] = make()
        mask: T = self._made[form]
        return mask

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        mask = self._made["mask"] if "mask" in self._made else self._dense()
        return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))

    def _dense(self) -> Tensor:
        firsts = self._firsts[1]
        return visible_tokens(firsts, self._start + firsts.shape[1])

    @property
    def _firsts(self) -> tuple[Tensor, Tensor]:
        """Return the places where each token's document starts, and of the first token that it sees."""
        assert self._positions is not None, "without positions nothing is hidden"
        return self._once("firsts", partial(self._starts_and_firsts, self._positions))

    def _starts_and_firsts(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        places_S = self._start + token_places(positions_BS.shape[1], self.state, positions_BS.device)
        return starts_and_firsts(positions_BS, self._window, places_S)

    def _bounds_of_chunks(self, positions_BS: Tensor) -> list[list[int]]:
        """Return the lowest and the highest place that tokens of each chunk of queries see first."""
        firsts, host_positions = self._firsts[1], on_host(positions_BS)
        if host_positions is None and (torch.compiler.is_compiling() or positions_BS.is_meta):
            return [[0, positions_BS.shape[1] * self.state.context.size]] * 2
        # Else an accelerator is waited for, once a forward.
        if host_positions is not None and host_positions is not positions_BS:
            firsts = self._starts_and_firsts(host_positions)[1]
        halves = firsts.unflatten(-1, (2, -1))
        bounds: list[list[int]] = torch.stack((halves.amin((0, 2)), halves.amax((0, 2))), dim=1).tolist()
        return bounds
