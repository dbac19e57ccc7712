"""Attention over the heads of a rank; key/value heads that the ranks do not divide."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.compare_layers import compare_with_one_device
from torch import nn
from torch.nn import functional as F
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from trilith import layers
from trilith.layers import (
    MLP,
    Alibi,
    AttentionScope,
    ColumnParallelLinear,
    GatedMLP,
    RotaryEmbedding,
    RowParallelLinear,
    SharedHeads,
    activation,
    alibi_slopes,
    causal_attention,
    cut_sequence,
    merge_heads,
    split_heads,
)
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.testing import run_parallel


def test_splitting_and_merging_heads_are_inverse():
    x = torch.randn(2, 5, 12)
    heads = split_heads(x, 4)
    assert heads.shape == (2, 3, 5, 4) and torch.equal(heads[:, 1], x[..., 4:8])
    assert torch.equal(merge_heads(heads), x)


@pytest.mark.parametrize("kv", [6, 3, 2, 1])
def test_attention_is_softmax_of_scores_below_the_diagonal(kv):
    q, k, v = torch.randn(2, 6, 7, 4), torch.randn(2, kv, 7, 4), torch.randn(2, kv, 7, 4)
    keys, values = (t.repeat_interleave(6 // kv, 1) for t in (k, v))
    scores = q @ keys.transpose(-1, -2) / 2 + torch.full((7, 7), float("-inf")).triu(1)
    torch.testing.assert_close(causal_attention(q, k, v), scores.softmax(-1) @ values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        causal_attention(q, k, v, scale=0.1),
        ((scores * 2 * 0.1).softmax(-1)) @ values,
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_takes_a_share_of_the_softmax_forward_and_backward(window):
    shapes = (2, 6, 9, 8), (2, 3, 9, 8), (2, 3, 9, 8), (6,)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    q, k, v, sinks = given
    scope = AttentionScope(torch.arange(9).expand(2, 9), window=window)
    found = causal_attention(q, k, v, scope, sinks=sinks)
    keys, values = (t.repeat_interleave(2, 1) for t in (k, v))
    unseen = ~torch.ones(9, 9, dtype=torch.bool).tril().triu(1 - (window or 9))
    scores = (q @ keys.transpose(-1, -2) / 8**0.5).masked_fill(unseen, float("-inf"))
    with_sinks = torch.cat((scores, sinks.view(-1, 1, 1).expand(2, 6, 9, 1)), dim=-1)
    wanted = with_sinks.softmax(-1)[..., :-1] @ values
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(wanted)
    pairs = zip(
        torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, given, grad), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def sunk(ring, window):
    """Return the output here and the whole gradients of q, k, v and the sinks; ``ring`` ``None``: alone."""
    torch.manual_seed(0)
    layout = Layout() if ring is None else Layout.of(context=2, ring=ring)
    state = ParallelState.start(layout)
    shapes = (2, 6, 8, 4), (2, 3, 8, 4), (2, 3, 8, 4), (6,)
    q, k, v, sinks = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    grad = torch.randn(2, 6, 8, 4, dtype=torch.float64)
    positions = cut_sequence(torch.arange(8).expand(2, 8), state)
    here = [cut_sequence(one, state, dim=2) for one in (q, k, v)]
    out = causal_attention(*here, AttentionScope(positions, window=window, state=state), sinks=sinks)
    out.backward(cut_sequence(grad, state, dim=2))
    found = [one.grad for one in (q, k, v, sinks)]
    for one in found if layout.world > 1 else ():
        dist.all_reduce(one)
    return [out.detach(), *found]


@pytest.mark.parametrize("window", [None, 3])
def test_over_context_ranks_a_sink_counts_once(window):
    ((whole, *gradients),) = run_parallel(sunk, 1, None, window)
    for ring in (False, True):
        for rank, (out, *found) in enumerate(run_parallel(sunk, 2, ring, window)):
            state = ParallelState.stand_in(Layout.of(context=2, ring=ring), rank)
            torch.testing.assert_close(out, cut_sequence(whole, state, dim=2), rtol=1e-10, atol=1e-12)
            for one, other in zip(found, gradients, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rounded", [False, True])
def test_biases_by_distance_are_added_to_the_scores(rounded):
    """Each head has its own slope, and positions count in the document; two ranks have the heads of one."""
    q, k, v = (torch.randn(2, 12, 9, 8, dtype=torch.float64) for _ in range(3))
    positions = torch.stack((torch.arange(9), torch.cat((torch.arange(4), torch.arange(5)))))
    alibi = Alibi(alibi_slopes(12), factor=0.3, rounded=rounded)
    slopes = torch.tensor(alibi_slopes(12), dtype=torch.float64).view(1, 12, 1, 1)
    keys = positions[:, None, None, :]
    products = (slopes.bfloat16() * keys.bfloat16()).double() if rounded else slopes * keys
    scores = (q @ k.transpose(2, 3) * 8**-0.5 + 0.3 * products).masked_fill(
        ~seen_by_hand(positions).unsqueeze(1), -math.inf
    )
    scope, expected = AttentionScope(positions), scores.softmax(-1) @ v
    torch.testing.assert_close(causal_attention(q, k, v, scope, alibi=alibi), expected)
    parts = [
        causal_attention(
            *(one[:, heads] for one in (q, k, v)), scope, alibi=alibi.of_heads(heads.start, heads.stop)
        )
        for heads in (slice(0, 6), slice(6, 12))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)


def test_each_tensor_rank_biases_its_own_heads():
    alibi, held = Alibi(alibi_slopes(6), factor=0.5, rounded=True), []
    for rank in range(3):
        state = ParallelState.stand_in(Layout.of(tensor=3), rank)
        held.append(layers.Attention(24, heads=6, head_dim=4, alibi=alibi, state=state).alibi)
    assert held == [Alibi(alibi.slopes[i : i + 2], 0.5, True) for i in (0, 2, 4)]


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 71, 112])
def test_slopes_are_those_of_transformers(heads):
    wanted = _get_alibi_slopes(heads, torch.device("cpu"))
    assert torch.equal(torch.tensor(alibi_slopes(heads)), wanted)


def seen_by_hand(positions):
    """Entry (i, j) of each row: whether i sees j."""
    return torch.stack(
        [
            torch.tensor([[i - p <= j <= i for j in range(len(row))] for i, p in enumerate(row)])
            for row in positions.tolist()
        ]
    )


def test_a_token_sees_its_own_document_up_to_itself():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    mask = AttentionScope(positions).mask
    assert mask is not None and torch.equal(mask.squeeze(1), seen_by_hand(positions))
    q, k, v = torch.randn(2, 6, 7, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    packed = causal_attention(q, k, v, AttentionScope(positions))
    for row, start, stop in ((0, 0, 3), (0, 3, 5), (0, 5, 6), (0, 6, 7), (1, 0, 7)):
        piece = (slice(row, row + 1), slice(None), slice(start, stop))
        torch.testing.assert_close(packed[piece], causal_attention(q[piece], k[piece], v[piece]))


def test_heads_that_share_keys_under_a_mask_are_given_a_kernel_that_takes_both(monkeypatch):
    """No GPU kernel takes both a mask and groups: the fallback would write out all scores."""
    seen, kernel = [], F.scaled_dot_product_attention

    def watched(q, k, v, **said):
        seen.append((q.shape[1], k.shape[1], v.shape[1], said["attn_mask"] is None, said["enable_gqa"]))
        out = kernel(q, k, v, **said)
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    q, k = torch.randn(1, 6, 4, 4), torch.randn(1, 2, 4, 4)
    causal_attention(q, k, k, AttentionScope(torch.tensor([[0, 1, 0, 1]])))
    causal_attention(q, k, k)
    assert seen == [(6, 6, 6, False, False), (6, 2, 2, True, True)]


@pytest.mark.parametrize("positions", [None, torch.arange(7), torch.arange(7).expand(2, -1)])
def test_one_document_a_row_needs_no_mask(positions):
    assert AttentionScope(positions).mask is None


@given(st.data())
def test_every_query_head_meets_its_own_key_head(data):
    """The heads that a shared output computes, lined up by ``SharedHeads``, for any heads and ranks."""
    kv = data.draw(st.integers(1, 12), label="key/value heads")
    queries = kv * data.draw(st.integers(1, 6), label="queries per key/value head")
    tensor = data.draw(
        st.sampled_from([n for n in range(1, queries + 1) if queries % n == 0]), label="tensor"
    )
    here = queries // tensor
    for rank in range(tensor):
        state = ParallelState.stand_in(Layout.of(tensor=tensor), rank)
        layer = ColumnParallelLinear(1, {"q": queries, "k": kv}, False, shared=("k",), state=state)
        key = layer.parts[1]
        held = list(range(kv))[key.slice or slice(rank * kv // tensor, (rank + 1) * kv // tensor)]
        assert key.here == len(held)
        share = SharedHeads(queries, kv, state=state)
        lined_up = share(torch.tensor(held).reshape(1, -1, 1, 1)).flatten().tolist()
        assert here % len(lined_up) == 0
        runs = here // len(lined_up)
        met = [lined_up[j // runs] for j in range(here)]
        assert met == [q // (queries // kv) for q in range(rank * here, (rank + 1) * here)]


class Attention(nn.Module):
    """A model's attention. (Without rotation the gradient of the keys' bias would be zero.)"""

    def __init__(self, queries, kv, state):
        super().__init__()
        self.qkv = ColumnParallelLinear(
            12, {"q": 4 * queries, "k": 4 * kv, "v": 4 * kv}, unit=4, shared=("k", "v"), state=state
        )
        self.rotary = RotaryEmbedding(4, 100.0)
        self.shared = SharedHeads(queries, kv, state=state)
        self.out = RowParallelLinear(4 * queries, 12, unit=4, state=state)

    def forward(self, x):
        q, k, v = (split_heads(t, 4) for t in self.qkv(x))
        rope = self.rotary(torch.arange(q.shape[2]), x.dtype)
        heads = causal_attention(rope(q), self.shared(rope(k)), self.shared(v))
        y = self.out(merge_heads(heads))
        return y


def attention_in_parts(queries, kv, sequence):
    state = ParallelState.start(Layout.of(tensor=dist.get_world_size(), sequence=sequence))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    between = 1 if sequence else None
    return compare_with_one_device(
        lambda s: Attention(queries, kv, s),
        torch.randn(2, 8, 12),
        state,
        input_dim=between,
        output_dim=between,
    )


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    ("tensor", "queries", "kv"),
    [(2, 4, 4), (2, 4, 2), (2, 4, 1), (2, 6, 3), (4, 4, 1), (4, 8, 2), (4, 12, 3), (4, 12, 6), (4, 8, 8)],
)
def test_attention_in_parts_equals_one_device(tensor, queries, kv, sequence):  # E2
    assert max(run_parallel(attention_in_parts, tensor, queries, kv, sequence)) < 1e-12


def mlps_in_parts(sequence):
    state = ParallelState.start(Layout.of(tensor=dist.get_world_size(), sequence=sequence))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    between = 1 if sequence else None
    x = torch.randn(2, 8, 12)

    def gated(s):
        return GatedMLP(12, 20, bias=True, state=s)

    def plain(s):
        return MLP(12, 20, act="gelu_new", state=s)

    return [
        compare_with_one_device(make, x, state, input_dim=between, output_dim=between)
        for make in (gated, plain)
    ]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_feed_forward_nets_in_parts_equal_one_device(sequence):
    for worst in run_parallel(mlps_in_parts, 4, sequence):
        assert max(worst) < 1e-12


def test_an_unknown_activation_is_refused():  # D12
    with pytest.raises(BadInput, match=r"hidden_act: expected one of silu, .*found 'swish2'"):
        activation("swish2")
