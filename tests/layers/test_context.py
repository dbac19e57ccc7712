"""Pieces of attention put together: the sequence's chunks, which blocks a rank computes, what each gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from trilith.layers import (
    AttentionScope,
    causal_attention,
    cut_sequence,
    default_positions,
    token_places,
)
from trilith.layers.attention import blockwise as blocks
from trilith.layers.attention import kernel_checks
from trilith.layers.attention.blockwise import BlockAttentionOptions, attend, attend_backward
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import run_parallel

SETTINGS = BlockAttentionOptions(1.0, False)
_sizes = st.sampled_from([2, 3, 4, 8])


def ranks(size):
    return [ParallelState.stand_in(Layout.of(context=size), rank) for rank in range(size)]


@given(_sizes, st.integers(1, 3))
def test_chunks_are_the_sequence_and_places_say_where(size, chunk):
    whole = torch.randn(2, 2 * size * chunk, 3)
    seen = torch.zeros(whole.shape[1])
    for state in ranks(size):
        places = token_places(2 * chunk, state)
        assert torch.equal(cut_sequence(whole, state), whole[:, places])
        assert torch.equal(default_positions(whole[:, : 2 * chunk, 0], state, embedded=False), places)
        seen[places] += 1
    assert bool((seen == 1).all())


def work(scope, size, chunk):
    """Count the pairs of query and key that a rank computes with each rank's keys."""
    half = chunk * (chunk + 1) // 2
    return [
        sum(
            half if options.causal else chunk * chunk for *_, options in scope.blocks(source, chunk, SETTINGS)
        )
        for source in range(size)
    ]


@given(_sizes, st.integers(1, 16))
def test_every_rank_has_the_same_work_with_any_ranks_keys(size, chunk):
    """With its own keys a rank has two causal halves and a whole block, with any other's two whole blocks."""
    for state in ranks(size):
        found = work(AttentionScope(None, state=state), size, chunk)
        own = found.pop(state.context.index)
        assert own == chunk * (chunk + 1) + chunk * chunk
        assert found == [2 * chunk * chunk] * (size - 1)
        length = 2 * size * chunk
        assert size * (own + sum(found)) == length * (length + 1) // 2, "all pairs, none twice"


@given(_sizes, st.integers(1, 4), st.data())
def test_blocks_and_masks_are_what_the_whole_mask_says(size, chunk, data):
    length = 2 * size * chunk
    starts = data.draw(st.lists(st.booleans(), min_size=2 * length, max_size=2 * length))
    places = torch.arange(length).expand(2, -1)
    positions = places - torch.where(torch.tensor(starts).view(2, -1), places, 0).cummax(1).values
    window = data.draw(st.sampled_from([None, 1, chunk, 3 * chunk]))
    expected = AttentionScope(positions, window=window).mask
    whole = torch.ones(2, 1, length, length).tril().bool() if expected is None else expected
    for state in ranks(size):
        scope = AttentionScope(cut_sequence(positions, state), window=window, state=state)
        found = torch.zeros(2, 1, 2 * chunk, length, dtype=torch.bool)
        for source, other in enumerate(ranks(size)):
            keys = token_places(2 * chunk, other)
            for rows, key_rows, options in scope.blocks(source, chunk, SETTINGS):
                seen = options.mask
                if seen is None:
                    seen = torch.ones(chunk, chunk, dtype=torch.bool)
                    seen = seen.tril() if options.causal else seen
                found[:, :, rows, keys[key_rows]] = seen
        assert torch.equal(found, whole[:, :, token_places(2 * chunk, state)])


def test_a_window_leaves_out_the_blocks_before_it():
    state = ranks(4)[3]  # chunks 3 and 4 of 8
    scope = AttentionScope(token_places(16, state), window=9, state=state)
    found = {source: [*scope.blocks(source, 8, SETTINGS)] for source in range(4)}
    assert found[0] == [] and found[1] == [], "chunks 0, 7 and 1, 6"
    ((rows, key_rows, options),) = found[2]
    assert (rows, key_rows, options.causal) == (slice(0, 8), slice(0, 8), False)
    assert options.mask is not None, "chunk 3 begins to see in the middle of chunk 2"
    assert len(found[3]) == 3


class Attend(torch.autograd.Function):
    """Compute a block alone, as a function with a gradient."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        out, log_sums = attend(q, k, v, options)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, *grads):
        return *attend_backward(grads[0], *ctx.saved_tensors, ctx.options), None


attention = Attend.apply


def heads(dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(2, h, 5, 4, dtype=dtype, requires_grad=True) for h in (6, 2, 2)]


@pytest.mark.parametrize("at_once", [2**26, 2 * 6 * 5 * 2], ids=["whole", "two-rows-at-a-time"])
@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
def test_a_block_is_attention_with_its_gradients(kind, at_once, monkeypatch):
    """It uses the fused operator if there is no mask, else the formula, a few rows at a time."""
    monkeypatch.setattr(blocks, "_AT_ONCE", at_once)
    if at_once < 2**20:
        monkeypatch.setattr(blocks, "_fused", lambda q, how: False)
    mask = (torch.rand(2, 1, 5, 5) < 0.5) | torch.eye(5).bool() if kind == "mask" else None
    q, k, v = heads()
    ours = attention(q, k, v, BlockAttentionOptions(0.3, kind == "causal", mask))
    grad = torch.randn_like(ours)
    found = torch.autograd.grad(ours, (q, k, v), grad)
    theirs = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=kind == "causal", scale=0.3, enable_gqa=True
    )
    for one, other in zip(
        [ours, *found], [theirs, *torch.autograd.grad(theirs, (q, k, v), grad)], strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_fused_operator_that_is_wrong_or_not_there_is_not_used(monkeypatch):
    """Each width and dtype of heads is tried, with as many keys as queries and with more."""
    right = blocks.flash_attention_backward

    def fused(width=64):
        return kernel_checks.is_right("blocks", torch.device("cpu"), torch.float32, width)

    assert fused()
    for dim, size in ((3, 64), (2, 96)):

        def wrong(*tensors, dim=dim, size=size, **how):
            dq, dk, dv = right(*tensors, **how)
            return dq, dk * 1.01 if dk.shape[dim] == size else dk, dv

        monkeypatch.setattr(blocks, "flash_attention_backward", wrong)
        kernel_checks._tried.cache_clear()
        with pytest.warns(UserWarning, match=r"fused attention on cpu .* of 64 in float32: .* of 1\.0e-02"):
            assert not fused()
        assert not fused()  # nor is it tried again
    monkeypatch.setattr(blocks, "flash_attention_backward", right)
    assert fused(32) and not fused()
    kernel_checks._tried.cache_clear()


def test_a_query_that_sees_no_key_of_a_block_weighs_nothing():
    q, k, v = heads()
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    mask[..., 2, :] = False
    out, log_sums = attend(q, k, v, BlockAttentionOptions(0.5, False, mask))
    assert bool((out[:, :, 2] == 0).all()) and bool(log_sums[:, :, 2].isneginf().all())
    assert bool(out.isfinite().all()) and bool(log_sums[:, :, 3].isfinite().all())


def test_dropout_is_drawn_again_in_backward(monkeypatch):
    monkeypatch.setattr(blocks, "_AT_ONCE", 2 * 6 * 5 * 2)
    options = BlockAttentionOptions(0.5, True, dropout=0.4, seed=11)
    torch.autograd.gradcheck(lambda *qkv: attention(*qkv, options), heads(), fast_mode=True)
    kept = attend(*heads(), BlockAttentionOptions(0.5, True, dropout=0.4, seed=11))[0]
    other = attend(*heads(), BlockAttentionOptions(0.5, True, dropout=0.4, seed=12))[0]
    assert torch.equal(kept, attend(*heads(), options)[0]) and not torch.equal(kept, other)


def test_dropout_is_right_on_average():
    q, k, v = (t.detach() for t in heads())
    expected = attend(q, k, v, BlockAttentionOptions(0.5, True))[0]
    drawn = torch.stack(
        [attend(q, k, v, BlockAttentionOptions(0.5, True, None, 0.3, seed))[0] for seed in range(1000)]
    )
    assert float((drawn.mean(0) - expected).abs().max()) < 0.2
    assert float(drawn.std(0)[:, :, 1:].min()) > 0.01


def gradient_of_the_first_value(layout):
    """Return it in bf16: query 15 adds 1, and 23 on the same rank and 31 on the other 3/8 of a digit."""
    state = ParallelState.start(layout)
    places = token_places(16, state)
    q, k, v = (torch.zeros(1, 1, 16, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    parts = {15: 1.0, 23: 0.375 * 2**-7, 31: 0.375 * 2**-7}
    grads = [parts.get(place, 0.0) * (place + 1) for place in places.tolist()]  # each key weighs the same
    out = causal_attention(q, k, v, AttentionScope(places.expand(1, -1), state=state))
    out.backward(torch.tensor(grads, dtype=out.dtype).view(1, 1, -1, 1).expand_as(out))
    return float(v.grad[0, 0, 0, 0])


@pytest.mark.parametrize("ring", [False, True])
def test_gradients_of_keys_and_values_are_rounded_once(ring):
    found, _ = run_parallel(gradient_of_the_first_value, 2, Layout.of(context=2, ring=ring))
    assert found == 1 + 2**-7
