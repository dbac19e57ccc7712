"""Attention against its definition: heads, sinks, biases, documents; latent attention and what it keeps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layers import RANK, ROPE, latent
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from trilith import layers
from trilith.layers import (
    Alibi,
    Attention,
    AttentionInputs,
    AttentionScope,
    ColumnParallelLinear,
    KeyValueCache,
    RotaryEmbedding,
    alibi_slopes,
    causal_attention,
    inverse_frequencies,
)
from trilith.layers.host_numbers import constants
from trilith.parallel_state import Layout, ParallelState


@pytest.mark.parametrize("kv", [6, 3, 2, 1])
def test_attention_is_softmax_of_scores_below_the_diagonal(kv):
    q, k, v = torch.randn(2, 6, 7, 4), torch.randn(2, kv, 7, 4), torch.randn(2, kv, 7, 4)
    keys, values = (t.repeat_interleave(6 // kv, 1) for t in (k, v))
    scores = q @ keys.transpose(-1, -2) / 2 + torch.full((7, 7), float("-inf")).triu(1)
    torch.testing.assert_close(causal_attention(q, k, v), scores.softmax(-1) @ values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        causal_attention(q, k, v, scale=0.1), ((scores * 2 * 0.1).softmax(-1)) @ values, rtol=1e-5, atol=1e-6
    )
    wider, wide = torch.cat([v, v + 1], -1), torch.cat([values, values + 1], -1)
    torch.testing.assert_close(causal_attention(q, k, wider), scores.softmax(-1) @ wide, rtol=1e-5, atol=1e-6)


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
        held.append(layers.Attention(24, heads=6, head_dim=4, alibi=alibi, state=state).scores.alibi)
    assert held == [Alibi(alibi.slopes[i : i + 2], 0.5, True) for i in (0, 2, 4)]


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 71, 112])
def test_slopes_are_those_of_transformers(heads):
    second_position = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.equal(torch.tensor(alibi_slopes(heads)), second_position)


def seen_by_hand(positions):
    """Entry (i, j) of each row: whether i sees j."""
    return torch.stack(
        [
            torch.tensor([[i - p <= j <= i for j in range(len(row))] for i, p in enumerate(row)])
            for row in positions.tolist()
        ]
    )


def test_heads_that_share_keys_under_a_mask_are_given_a_kernel_that_takes_both(monkeypatch):
    """No GPU kernel takes both a mask and groups: the fallback would write out all scores."""
    seen, kernel = [], F.scaled_dot_product_attention

    def watched(q, k, v, **said):
        seen.append((q.shape[1], k.shape[1], v.shape[1], said["attn_mask"] is None, said["enable_gqa"]))
        return kernel(q, k, v, **said) if len(seen) < 3 else v

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    q, k = torch.randn(1, 6, 4, 4), torch.randn(1, 2, 4, 4)
    causal_attention(q, k, k, AttentionScope(torch.tensor([[0, 1, 0, 1]])))
    causal_attention(q, k, k)
    monkeypatch.setattr("trilith.layers.attention.causal.choose_backend", lambda *_: "efficient")
    causal_attention(q, k, k)  # as it would be on a GPU, whose memory-efficient kernel takes no groups
    assert seen == [(6, 6, 6, False, False), (6, 2, 2, True, True), (6, 6, 6, True, False)]


@pytest.mark.parametrize("positions", [None, torch.arange(7), torch.arange(7).expand(2, -1)])
def test_one_document_a_row_needs_no_mask(positions):
    assert AttentionScope(positions).mask is None


@given(st.data())
def test_every_query_head_meets_its_own_key_head(data):
    """The heads that a shared output computes, spread where they are uneven, for any heads and ranks."""
    kv = data.draw(st.integers(1, 12), label="key/value heads")
    queries = kv * data.draw(st.integers(1, 6), label="queries per key/value head")
    tensor = data.draw(
        st.sampled_from([n for n in range(1, queries + 1) if queries % n == 0]), label="tensor"
    )
    here = queries // tensor
    for rank in range(tensor):
        state = ParallelState.stand_in(Layout.of(tensor=tensor), rank)
        key = ColumnParallelLinear(1, {"q": queries, "k": kv}, False, shared=("k",), state=state).parts["k"]
        held = list(range(kv))[key.rows_here or slice(rank * kv // tensor, (rank + 1) * kv // tensor)]
        assert len(key.here()) == len(held)
        groups = Attention(queries, heads=queries, head_dim=1, kv_heads=kv, state=state).groups
        assert [*groups.held] == held
        lined_up = held if groups.even else groups.spread(torch.tensor(held).reshape(1, -1, 1, 1)).flatten()
        assert here % len(lined_up) == 0
        runs = here // len(lined_up)
        met = [int(lined_up[j // runs]) for j in range(here)]
        assert met == [q // (queries // kv) for q in range(rank * here, (rank + 1) * here)]


@torch.no_grad()
def test_a_cache_keeps_the_latent_and_one_rotated_key_a_token():
    mixer, x = latent(None, 7).eval(), torch.randn(2, 6, 12)
    positions, cache = torch.arange(6).expand(2, -1), KeyValueCache(2, 8)
    pieces = []
    for part in (slice(0, 4), slice(4, 5), slice(5, 6)):
        inputs = AttentionInputs(
            positions[:, part], cache, like=x, rotary={"all": mixer.rotary}, state=mixer.state
        )
        pieces.append(mixer.layer(x[:, part], inputs))
    torch.testing.assert_close(torch.cat(pieces, dim=1), mixer(x), rtol=1e-5, atol=1e-6)
    assert [tuple(one.shape) for one in cache.held(mixer.layer)] == [(2, 1, 8, RANK), (2, 1, 8, ROPE)]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.3},
    "yarn": {**YARN, "attention_factor": 1.3},
    "yarn's own factor": YARN,
    "yarn of two scales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "llama3": LLAMA3,
    "llama3.1-405b": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3.2-1b": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "theta"), [(16, 10_000.0), (64, 500_000.0), (128, 500_000.0)])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_the_rotation_is_transformers_bit_for_bit(scaling, head_dim, theta, dtype):
    q = torch.randn(2, 3, 40, head_dim).to(dtype)
    positions = torch.stack((torch.arange(40), torch.arange(100, 140)))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": head_dim}
    rope = {"max_position_embeddings": 131_072, "rope_parameters": {"rope_theta": theta, **scaling}}
    expected = LlamaRotaryEmbedding(LlamaConfig(hidden_size=4 * head_dim, **heads, **rope))
    wanted, _ = apply_rotary_pos_emb(q, q, *expected(q, positions))
    ours = RotaryEmbedding(head_dim, theta, scaling)
    assert torch.equal(inverse_frequencies(head_dim, theta, scaling), expected.inv_freq)
    rope = ours(positions, dtype)
    assert rope(q).dtype == dtype and torch.equal(rope(q), wanted)
    # One sequence's positions serve the whole batch.
    assert torch.equal(ours(positions[0], dtype)(q)[0], wanted[0])


def test_rows_without_lengths_are_documents_of_their_own():
    dynamic = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 64}
    ours, positions = RotaryEmbedding(16, 1e4, dynamic), torch.tensor([[98, 99], [40, 41]])
    lengths = torch.tensor([[100, 100], [42, 42]])
    expected = ours(positions, torch.float32, lengths).cos
    assert torch.equal(ours(positions, torch.float32).cos, expected)
    like, state = torch.zeros(2, 2, 4), ParallelState.alone()
    rope = AttentionInputs(positions, like=like, rotary={"all": ours}, state=state).rope("all")
    assert torch.equal(rope.cos, expected)


def test_constants_of_a_trace_end_with_it():
    asked = (0.5, 0.25), torch.device("cpu"), torch.float32
    with FakeTensorMode():
        constants(*asked)
    assert torch.equal(constants(*asked), torch.tensor(asked[0])) and constants(*asked) is constants(*asked)


def test_fp64_stays_fp64():
    rope = RotaryEmbedding(16, 1e4)(torch.arange(100_000), torch.float64)
    angle = 99_999 * inverse_frequencies(16, 1e4).double()
    assert torch.equal(rope.cos[-1, :8], angle.cos()) and torch.equal(rope.sin[-1, 8:], angle.sin())
