"""Compute ring attention, or attention over gathered keys and values, of the tokens of one context rank.

The queries of this rank see the keys and values of all context ranks. These come around a ring
(``layout.ring``), where a rank computes with those of one rank while it receives those of the next, or all at
once by an all-gather. The blocks of attention are the same in both cases, and follow from what this rank's
tokens see of the whole sequence. Forward combines the blocks by their log-sums. Backward does not keep the
other ranks' keys and values, but fetches them again, and returns their gradients by a reduce-scatter, or
around the ring behind them.

B batch  S tokens here  H query heads here  K key/value heads here  E head dim

Sources: Liu et al. 2023 (ring attention); Llama 3, section 3.3.2 (all-gathered keys and values).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...parallel_state import ParallelState, engine
from ..context_chunks import own_chunks, token_places
from ..host_numbers import on_host
from ..rounds import rounds
from .blockwise import BlockAttentionOptions, attend, attend_backward
from .kernel_checks import is_right
from .scores import Alibi, Scores, add_sinks, sinks_gradient


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
        self._bounds: Sequence[Sequence[int]] = ()
        if positions is None:
            return
        starts, first = starts_and_firsts(positions, window, state)
        here = on_host(positions)  # else this waits for an accelerator, once a forward
        if here is None and (torch.compiler.is_compiling() or positions.is_meta):
            bounds = [(0, positions.shape[-1] * state.context.size)] * 2
        else:
            seen = first
            if here is not None and here is not positions:
                seen = starts_and_firsts(here, window, state)[1]
            halves = seen.unflatten(-1, (2, -1))
            bounds = torch.stack((halves.amin((0, 2)), halves.amax((0, 2))), dim=1).tolist()
        if any(last > 0 for _, last in bounds):
            self.first, self._starts, self._bounds = first, starts, bounds

    def fused(self, q_BHSE: Tensor, width: int = 0) -> bool:
        """Return whether torch's fused operators may compute blocks, see ``kernel_checks``; ``width``: the
        head dim, if ``q`` is only a stand-in.
        """
        return is_right("blocks", q_BHSE.device, q_BHSE.dtype, width or q_BHSE.shape[-1], self.state)

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


def starts_and_firsts(positions: Tensor, window: int | None, state: ParallelState) -> tuple[Tensor, Tensor]:
    """Return the places where each token's document starts, and of the first token that it sees."""
    places = token_places(positions.shape[-1], state, positions.device)
    starts = (places - positions).reshape(-1, positions.shape[-1]).clamp(min=0)
    return starts, starts if window is None else torch.maximum(starts, places - (window - 1))


def context_attention(
    q_BHSE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    scope: ContextScope,
    scores: Scores,
) -> Tensor:
    """Compute attention over the whole sequence, (B, H, S, E): a token sees the tokens that the scope allows.

    Values may be narrower than queries and keys; the output is then as wide as the values.

    Only key/value heads are sent, never the queries that share them. Dropout's masks follow torch's
    generator, which should differ between the context ranks. Collective over the context ranks, in backward
    too.
    """
    settings = BlockAttentionOptions.of(q_BHSE, scores, causal=False, fused=scope.fused(q_BHSE))
    return _attention(q_BHSE, k_BKSE, v_BKSE, scores.sinks, scope, settings, scores.alibi)


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scope: ContextScope,
        settings: BlockAttentionOptions,
        alibi: Alibi | None,
    ) -> Tensor:
        chunk = q.shape[2] // 2
        inner = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q[..., : v.shape[-1]], dtype=inner)
        sums = torch.full(q.shape[:-1], float("-inf"), dtype=inner, device=q.device)
        for source, keys, values in _arriving(k, v, scope.state):
            for mine, key_rows, options in _blocks(scope, source, chunk, settings, alibi):
                part, log_sums = attend(q[:, :, mine], keys[:, :, key_rows], values[:, :, key_rows], options)
                _merge(out[:, :, mine], sums[:, :, mine], part, log_sums)
        if sinks is not None:  # after the last block, so that they count once
            out, sums = add_sinks(out, sums, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, sums)
        ctx.scope, ctx.settings, ctx.alibi = scope, settings, alibi
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, sums = ctx.saved_tensors
        scope, chunk, (grad,) = ctx.scope, q.shape[2] // 2, grads
        dsinks = None if sinks is None else sinks_gradient(grad, out, sums, sinks)
        if not any(engine.wanted_gradients(ctx)[:3]):  # the second part of a backward in two
            return None, None, None, dsinks, None, None, None
        dq = torch.zeros_like(q, dtype=sums.dtype)
        home = _Returning(scope.state)
        for source, keys, values in _arriving(k, v, scope.state):
            dkv = torch.zeros(k.numel() + v.numel(), dtype=sums.dtype, device=k.device)
            dks, dvs = _both(dkv, k, v)
            for mine, key_rows, options in _blocks(scope, source, chunk, ctx.settings, ctx.alibi):
                at = (slice(None), slice(None), mine)
                part, dk, dv = attend_backward(
                    grad[at], q[at], keys[:, :, key_rows], values[:, :, key_rows], out[at], sums[at], options
                )
                dq[at] += part
                dks[:, :, key_rows] += dk
                dvs[:, :, key_rows] += dv
            home.add(source, dkv)
        dk, dv = _both(home.arrived().to(k.dtype), k, v)
        return dq.to(q.dtype), dk, dv, dsinks, None, None, None


# torch declares ``apply`` without types.
_attention: Callable[..., Tensor] = _ContextAttention.apply


def _arriving(k: Tensor, v: Tensor, state: ParallelState) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each context rank's keys and values, this rank's first: there a token sees at least itself."""
    size, index, group = state.context.size, state.context.index, state.context.group
    here = torch.cat((k.flatten(), v.flatten()))
    if not state.layout.ring:
        gathered = engine.all_gather(here, 0, group).unflatten(0, (size, -1))
        for step in rounds(range(size), of_ranks=True):
            source = (index - step) % size
            yield source, *_both(gathered[source], k, v)
        return
    for step in rounds(range(size), of_ranks=True):
        last = step == size - 1
        coming = here if last else engine.ring_exchange_start(here, group)
        yield (index - step) % size, *_both(here, k, v)
        here = here if last else engine.ring_exchange_wait(coming, here)


def _both(kv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of one piece of memory; their heads may differ in width."""
    return kv[: k.numel()].view(k.shape), kv[k.numel() :].view(v.shape)


class _Returning:
    """Send gradients of keys and values back to the ranks that hold these, in the order of ``_arriving``."""

    def __init__(self, state: ParallelState) -> None:
        self.state = state
        self._own: Tensor | None = None
        self._coming: Tensor | None = None
        self._every: Tensor | None = None

    def add(self, source: int, dkv: Tensor) -> None:
        """Add this rank's part of the gradients of the keys and values of ``source``, in one piece."""
        if not self.state.layout.ring:
            if self._every is None:
                self._every = dkv.new_empty(self.state.context.size, *dkv.shape)
            self._every[source] = dkv
        elif source == self.state.context.index:
            self._own = dkv
        else:
            if self._coming is not None:
                dkv += engine.ring_exchange_wait(self._coming, dkv)
            self._coming = engine.ring_exchange_start(dkv, self.state.context.group)

    def arrived(self) -> Tensor:
        """Return the gradients of this rank's keys and values, summed over all ranks."""
        if self._every is not None:
            return engine.reduce_scatter(self._every.flatten(), 0, self.state.context.group)
        assert self._own is not None and self._coming is not None
        return self._own + engine.ring_exchange_wait(self._coming, self._own)


def _blocks(
    scope: ContextScope, source: int, chunk: int, settings: BlockAttentionOptions, alibi: Alibi | None
) -> Iterator[tuple[slice, slice, BlockAttentionOptions]]:
    """Yield the rows of queries and of keys of each block with the keys of ``source``, and its options: what
    it sees, and a dropout seed of its own.
    """
    for block in scope.blocks(source, chunk):
        queries, keys = (slice(half * chunk, (half + 1) * chunk) for half in (block.query, block.key))
        bias = None if alibi is None else alibi.bias(*scope.positions(source, block, chunk))
        seed = (settings.seed + 4 * source + 2 * block.query + block.key) % 2**63
        mask = scope.mask(block, chunk)
        yield queries, keys, replace(settings, causal=block.causal, mask=mask, seed=seed, bias=bias)


def _merge(out: Tensor, sums: Tensor, part: Tensor, log_sums: Tensor) -> None:
    """Merge one more block into the output so far, weighted by the log-sums, in place."""
    both = torch.logaddexp(sums, log_sums)
    out.mul_((sums - both).exp().unsqueeze(-1)).add_(part * (log_sums - both).exp().unsqueeze(-1))
    sums.copy_(both)
