"""State what this context rank's tokens see of the whole sequence, and which blocks of attention follow."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel_state import ParallelState
from ..context_chunks import own_chunks, token_places
from ..host_numbers import on_host
from .kernel_checks import is_right


@dataclass(frozen=True, slots=True)
class Block:
    """Pair one of this rank's two chunks of queries with one of a rank's two chunks of keys.

    ``query`` and ``key``: 0 or 1. ``causal``: both chunks are the same tokens. ``first``: the place of the
    block's first key, if some of the keys come before the first one that a query sees; otherwise ``None``.
    """

    query: int
    key: int
    causal: bool
    first: int | None = None


class ContextScope:
    """Hold the first token that each of this rank's tokens sees. It is made once a forward, from positions.

    A token sees the tokens from the first one of its document, or of its window, up to itself. That first
    one's place is the token's place minus its position, so other ranks' tokens need not be known.
    """

    def __init__(self, positions: Tensor | None, *, window: int | None = None, state: ParallelState) -> None:
        self.state = state
        #: (B or 1, S), the place of the first token that each token sees; ``None``: all see the row's first.
        self.first: Tensor | None = None
        #: The place where each token's document starts, of the same shape.
        self._starts: Tensor | None = None
        self._bounds: list[tuple[int, int]] = []
        self._fused: dict[object, bool] = {}
        if positions is None:
            return
        starts, first = _starts_and_firsts(positions, window, state)
        here = on_host(positions)  # else this waits for an accelerator, once a forward
        if here is None and (torch.compiler.is_compiling() or positions.is_meta):
            self.first, self._starts = first, starts
            self._bounds = [(0, positions.shape[-1] * state.context.size)] * 2
            return
        if here is not None and here is not positions:
            _, here = _starts_and_firsts(here, window, state)
        halves = (first if here is None or here is positions else here).unflatten(-1, (2, -1))
        bounds = torch.stack((halves.amin((0, 2)), halves.amax((0, 2))), dim=1).tolist()
        if any(last > 0 for _, last in bounds):
            self.first, self._starts = first, starts
            self._bounds = [(low, last) for low, last in bounds]

    def fused(self, q_BHSE: Tensor, width: int = 0) -> bool:
        """Return whether torch's fused operators may compute blocks, see ``kernel_checks``; ``width``: the
        head dim, if ``q`` is only a stand-in.
        """
        width = width or q_BHSE.shape[-1]
        if (key := (q_BHSE.dtype, width)) not in self._fused:
            right = is_right("blocks", q_BHSE.device, q_BHSE.dtype, width, self.state)
            self._fused[key] = right
        return self._fused[key]

    def blocks(self, source: int, chunk: int) -> Iterator[Block]:
        """Yield the blocks that this rank computes with the keys of context rank ``source``.

        ``chunk`` is the number of tokens in a chunk. Blocks that causality, documents or a window leave empty
        are skipped.
        """
        size = self.state.context.size
        # The later chunk of keys first: a query's first block then contains the query's own key.
        for key, keys in reversed([*enumerate(own_chunks(source, size))]):
            for query, queries in enumerate(own_chunks(self.state.context.index, size)):
                if keys > queries:
                    continue
                begin = keys * chunk
                low, last = self._bounds[query] if self._bounds else (0, 0)
                if low < begin + chunk:
                    yield Block(query, key, keys == queries, begin if last > begin else None)

    def mask(self, block: Block, chunk: int) -> Tensor | None:
        """Return a mask (B or 1, 1, chunk, chunk), true where a query (second to last dim) sees a key.

        ``None`` if causality alone decides.
        """
        if block.first is None or self.first is None:
            return None
        first = self.first[:, None, block.query * chunk : (block.query + 1) * chunk, None]
        keys = block.first + torch.arange(chunk, device=first.device)
        seen = keys >= first
        return seen.tril() if block.causal else seen

    def positions(self, source: int, block: Block, chunk: int) -> tuple[Tensor, Tensor]:
        """Return the positions of a block's queries, (B or 1, chunk), and of its keys, (B or 1, 1 or chunk,
        chunk). Both count from the start of the query's document, so no other rank's positions are needed.
        """
        size, here = self.state.context.size, torch.arange(chunk, device=self.state.device)
        queries = (own_chunks(self.state.context.index, size)[block.query] * chunk + here).unsqueeze(0)
        keys = (own_chunks(source, size)[block.key] * chunk + here).view(1, 1, -1)
        if self._starts is None:
            return queries, keys
        starts = self._starts[:, block.query * chunk : (block.query + 1) * chunk]
        return queries - starts, keys - starts.unsqueeze(2)


def _starts_and_firsts(positions: Tensor, window: int | None, state: ParallelState) -> tuple[Tensor, Tensor]:
    """Return the places where each token's document starts, and of the first token that it sees."""
    places = token_places(positions.shape[-1], state, positions.device)
    starts = (places - positions).reshape(-1, positions.shape[-1]).clamp(min=0)
    return starts, starts if window is None else torch.maximum(starts, places - (window - 1))
