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

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...parallel_state import ParallelState, engine
from ...parallel_state.engine.collectives import ring_exchange_start, ring_exchange_wait
from ..rounds import rounds
from .blockwise import BlockAttentionOptions, WholeAttention, attend, attend_backward
from .kernel_checks import is_right
from .mask import AttentionScope
from .scores import Scores


def context_attention(
    q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, scope: AttentionScope, scores: Scores
) -> Tensor:
    """Compute attention over the whole sequence, (B, H, S, E): a token sees the tokens that the scope allows.

    Values may be narrower than queries and keys; the output is then as wide as the values.

    Only key/value heads are sent, never the queries that share them. Dropout's masks follow torch's
    generator, which should differ between the context ranks. Collective over these, in backward too.
    """
    fused = is_right("blocks", q_BHSE.device, q_BHSE.dtype, q_BHSE.shape[-1])
    settings = BlockAttentionOptions.of(q_BHSE, scores, causal=False, fused=fused)
    blocks = partial(scope.blocks, chunk=q_BHSE.shape[2] // 2, settings=settings, alibi=scores.alibi)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q[..., : v.shape[-1]], dtype=inner)
        sums = torch.full(q.shape[:-1], float("-inf"), dtype=inner, device=q.device)
        for source, keys, values in _arriving(k, v, scope.state):
            for rows, key_rows, options in blocks(source):
                part, log_sums = attend(q[:, :, rows], keys[:, :, key_rows], values[:, :, key_rows], options)
                _merge(out[:, :, rows], sums[:, :, rows], part, log_sums)
        return out, sums

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq = torch.zeros_like(q, dtype=sums.dtype)

        def dkvs() -> Iterator[tuple[int, Tensor]]:
            for source, keys, values in _arriving(k, v, scope.state):
                dkv = torch.zeros(k.numel() + v.numel(), dtype=sums.dtype, device=k.device)
                dks, dvs = _both(dkv, k, v)
                for rows, key_rows, options in blocks(source):
                    at, there = (slice(None), slice(None), rows), (slice(None), slice(None), key_rows)
                    part, dk, dv = attend_backward(
                        grad[at], q[at], keys[there], values[there], out[at], sums[at], options
                    )
                    dq[at] += part
                    dks[there] += dk
                    dvs[there] += dv
                yield source, dkv

        own = _returned(dkvs(), scope.state).to(k.dtype)
        return dq, *_both(own, k, v)

    whole: Tensor = WholeAttention.apply(q_BHSE, k_BKSE, v_BKSE, scores.sinks, forward, backward)
    return whole


def _arriving(k: Tensor, v: Tensor, state: ParallelState) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each context rank's keys and values, this rank's first: there a token sees at least itself."""
    size, index, group = state.context.size, state.context.index, state.context.group
    block = torch.cat((k.flatten(), v.flatten()))
    if not state.layout.ring:
        gathered = engine.all_gather(block, 0, group).unflatten(0, (size, -1))
        for step in rounds(range(size), of_ranks=True):
            source = (index - step) % size
            yield source, *_both(gathered[source], k, v)
        return
    for step in rounds(range(size), of_ranks=True):
        last = step == size - 1
        coming = block if last else ring_exchange_start(block, group)
        yield (index - step) % size, *_both(block, k, v)
        block = block if last else ring_exchange_wait(coming, block)


def _both(kv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of one piece of memory; their heads may differ in width."""
    return kv[: k.numel()].view(k.shape), kv[k.numel() :].view(v.shape)


def _returned(dkvs: Iterator[tuple[int, Tensor]], state: ParallelState) -> Tensor:
    """Return the gradients of this rank's keys and values, summed over all ranks.

    ``dkvs``: this rank's part of those of each context rank, in the order of ``_arriving``.
    """
    group, gradients, coming = state.context.group, None, None
    if not state.layout.ring:
        for source, dkv in dkvs:
            gradients = dkv.new_empty(state.context.size, *dkv.shape) if gradients is None else gradients
            gradients[source] = dkv
        assert gradients is not None, "there is this rank's"
        return engine.reduce_scatter(gradients.flatten(), 0, group)
    _, own = next(dkvs)
    for _, dkv in dkvs:  # a part goes around behind the keys and values, to the rank that holds these
        if coming is not None:
            dkv += ring_exchange_wait(coming, dkv)
        coming = ring_exchange_start(dkv, group)
    assert coming is not None, "a ring has several ranks"
    return own + ring_exchange_wait(coming, own)


def _merge(out: Tensor, sums: Tensor, part: Tensor, log_sums: Tensor) -> None:
    """Merge one more block into the output so far, weighted by the log-sums, in place."""
    both = torch.logaddexp(sums, log_sums)
    out.mul_((sums - both).exp().unsqueeze(-1)).add_(part * (log_sums - both).exp().unsqueeze(-1))
    sums.copy_(both)
