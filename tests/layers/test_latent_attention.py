"""Latent attention and the replicated linear: in parts as on one device, and what a cache keeps."""

import pytest
import torch
import torch.distributed as dist
from support.compare_layers import compare_with_one_device, made_alike
from torch import nn
from torch.nn import functional as F
from trilith.layers import (
    AttentionInputs,
    KeyValueCache,
    MultiHeadLatentAttention,
    ReplicatedLinear,
    RotaryEmbedding,
    Tokens,
    attach_lora,
    causal_attention,
    cut_sequence,
    linears,
)
from trilith.parallel_state import BadInput, Layout, ParallelState, alone_or, declarations
from trilith.parallel_state.engine import local_data
from trilith.testing import Operators, run_parallel

HEADS, RANK, NOPE, ROPE, VALUE = 4, 10, 6, 4, 5


class Latent(nn.Module):
    """The attention with the rotation that a model makes, norms not 1, and perhaps adapters everywhere."""

    def __init__(self, q_lora_rank, adapters, state):
        super().__init__()
        self.state = alone_or(state)
        self.attention = MultiHeadLatentAttention(
            12,
            heads=HEADS,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=RANK,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=VALUE,
            bias=True,
            state=state,
        )
        self.rotary = RotaryEmbedding(ROPE, 1e4, interleaved=True)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                local_data(parameter).copy_(torch.linspace(0.5, 1.5, parameter.numel()))
        for name, layer in linears(self) if adapters else ():
            attach_lora(layer, r=2, alpha=4)
            stated = declarations(layer)["lora_B"]
            whole = torch.randn(stated.shape, generator=torch.Generator().manual_seed(len(name)))
            box = stated.box(self.state.layout, self.state.at)
            local_data(layer.lora_B).copy_(whole[box.slices])

    def forward(self, x_BSD):
        inputs = AttentionInputs(None, like=x_BSD, rotary={"all": self.rotary}, state=self.state)
        y_BSD = self.attention(x_BSD, inputs)
        return y_BSD


def in_parts(sequence):
    state = ParallelState.start(Layout.of(tensor=dist.get_world_size(), sequence=sequence))
    torch.set_default_dtype(torch.float64)
    between = 1 if sequence else None
    worst = 0.0
    for q_lora_rank in (None, 7):
        for adapters in (False, True):
            torch.manual_seed(0)
            x = torch.randn(2, 8, 12)
            found = compare_with_one_device(
                lambda s, rank=q_lora_rank, lora=adapters: Latent(rank, lora, s),
                x,
                state,
                input_dim=between,
                output_dim=between,
            )
            worst = max(worst, found)
    return worst


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_in_parts_it_equals_one_device(sequence):
    assert max(run_parallel(in_parts, 2, sequence)) < 1e-12


def over_context(ring):
    """Return the largest difference to one device; bytes by kind of collective, sent and planned."""
    state = ParallelState.start(Layout.of(context=2, ring=ring))
    torch.set_default_dtype(torch.float64)
    whole, mine = made_alike(lambda s: Latent(7, False, s), state)
    x = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(2))
    x_whole, x_mine = x.clone().requires_grad_(), cut_sequence(x, state).clone().requires_grad_()
    y_whole = whole(x_whole)
    with Operators() as operators:
        y_mine = mine(x_mine)
        y_mine.backward(torch.ones_like(y_mine))
    y_whole.backward(torch.ones_like(y_whole))
    assert x_whole.grad is not None and x_mine.grad is not None
    pairs = [(y_mine, cut_sequence(y_whole, state)), (x_mine.grad, cut_sequence(x_whole.grad, state))]
    sends = mine.attention.cost(Tokens(2, 4, 12, compute=8)).sends
    planned = {kind: sum(int(one.bytes) for one in sends if one.kind == kind) for kind in operators.sent}
    return max(float((a - b).detach().abs().max()) for a, b in pairs), dict(operators.sent), planned


@pytest.mark.parametrize("ring", [False, True], ids=["gathered", "ring"])
def test_over_context_ranks_it_equals_one_device_and_sends_what_it_says(ring):
    for worst, sent, planned in run_parallel(over_context, 2, ring):
        assert worst < 1e-12 and sent == planned and sent


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_what_is_replicated_has_partial_gradients_where_ranks_have_their_own_tokens(sequence):
    state = ParallelState.stand_in(Layout.of(tensor=2, sequence=sequence))
    partial = ("tensor",) if sequence else ()
    layer = Latent(7, True, state).attention
    for name, stated in declarations(layer).items():
        if name.startswith(("q_down", "kv_down", "q_norm", "kv_norm")):
            assert (stated.cut, stated.partial) == (None, partial), name
        elif name in ("q_up.weight", "kv_up.weight"):
            assert stated.cut is not None and (stated.cut.dim, stated.cut.unit) in (
                (0, NOPE + ROPE),
                (0, NOPE + VALUE),
            )


def test_a_replicated_linear_is_torchs():
    layer, x = ReplicatedLinear(6, 5), torch.randn(2, 3, 6)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    with pytest.raises(BadInput, match="ReplicatedLinear"):
        layer(torch.randn(2, 3, 5))


def test_values_may_be_narrower_than_keys_and_never_wider():
    q, k, v = torch.randn(2, 3, 7, 6), torch.randn(2, 3, 7, 6), torch.randn(2, 3, 7, 4)
    scores = q @ k.transpose(-1, -2) / 6**0.5 + torch.full((7, 7), float("-inf")).triu(1)
    found = causal_attention(q, k, v)
    assert found.shape == v.shape
    torch.testing.assert_close(found, scores.softmax(-1) @ v, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        BadInput, match="v_head_dim: expected at most 10, the width of a query head, found 11"
    ):
        MultiHeadLatentAttention(
            12,
            heads=2,
            q_lora_rank=None,
            kv_lora_rank=3,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=11,
        )


@torch.no_grad()
def test_a_cache_keeps_the_latent_and_one_rotated_key_a_token():
    layer, x = Latent(7, False, None).eval(), torch.randn(2, 6, 12)
    positions, cache = torch.arange(6).expand(2, -1), KeyValueCache(2, 8)
    pieces = []
    for part in (slice(0, 4), slice(4, 5), slice(5, 6)):
        inputs = AttentionInputs(
            positions[:, part], cache, like=x, rotary={"all": layer.rotary}, state=layer.state
        )
        pieces.append(layer.attention(x[:, part], inputs))
    torch.testing.assert_close(torch.cat(pieces, dim=1), layer(x), rtol=1e-5, atol=1e-6)
    assert [tuple(one.shape) for one in cache.held(layer.attention)] == [(2, 1, 8, RANK), (2, 1, 8, ROPE)]
