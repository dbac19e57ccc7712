"""Recurrent layers: chunks against one token at a time, documents, what is kept, FLOPs."""

from functools import partial

import pytest
import torch
from support.layers import WIDTH, positions_of
from torch.nn import functional as F
from trilith.layers import AttentionInputs, GatedDeltaNet, KeyValueCache
from trilith.layers.head_groups import HeadGroups
from trilith.layers.recurrent.decay import CHUNK
from trilith.layers.recurrent.gated_delta_net import gated_delta_rule
from trilith.layers.recurrent.mamba2 import state_space
from trilith.layers.recurrent.runs import Runs, recomputed
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.testing import LiveBytes

#: Lengths of the documents of two rows of 150 tokens: three chunks, of which one holds several documents.
DOCUMENTS = ((64, 1, 20, 65), (150,))


def runs_of(positions, x):
    state = ParallelState.alone()
    return Runs(AttentionInputs(positions, like=x, state=state), state)


def one_by_one(q, k, v, decay, beta, places):
    """Return the outputs (B, S, H, V) of the rule as the paper states it, and the last state (B, H, E, V)."""
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q * q.shape[-1] ** -0.5, k))
    state = q.new_zeros(len(q), v.shape[2], k.shape[-1], v.shape[-1])
    found = []
    for t in range(q.shape[1]):
        state = state * (places[:, t] > 0)[:, None, None, None] * decay[:, t, :, None, None].exp()
        wrong = v[:, t] - torch.einsum("bhev,bhe->bhv", state, k[:, t])
        state = state + torch.einsum("bh,bhe,bhv->bhev", beta[:, t], k[:, t], wrong)
        found.append(torch.einsum("bhev,bhe->bhv", state, q[:, t]))
    return [torch.stack(found, dim=1), state]


def check_alike(in_chunks, by_token, given):
    """Compare outputs and last states, and the gradients of what was given."""
    for one, other in zip(in_chunks, by_token, strict=True):
        assert float((one - other).detach().abs().max()) <= 1e-12
    seed = torch.randn_like(by_token[0])
    found, wanted = (torch.autograd.grad(y, given, seed, retain_graph=True) for y, _ in (in_chunks, by_token))
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max()) <= 1e-12 * float(other.abs().max())


@pytest.mark.parametrize("packed", [False, True], ids=["one-document", "documents"])
def test_the_delta_rule_in_chunks_is_the_rule_token_by_token(packed):
    torch.manual_seed(0)
    shapes = [(2, 150, 2, 5), (2, 150, 2, 5), (2, 150, 6, 4), (2, 150, 6), (2, 150, 6)]
    q, k, v, decay, beta = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    given = (q, k, v, -F.softplus(decay), beta.sigmoid())
    row = positions_of(DOCUMENTS) if packed else torch.arange(150).expand(2, -1)
    y, last = gated_delta_rule(*given, runs_of(row if packed else None, q.flatten(2)))
    wanted, state = one_by_one(*given, row)
    assert CHUNK < 150
    check_alike((y, last.flatten(1, 2)), (wanted, state), (q, k, v, decay, beta))


@pytest.mark.parametrize("packed", [False, True], ids=["one-document", "documents"])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_state_space_in_chunks_is_the_recurrence_token_by_token(packed, groups):
    torch.manual_seed(0)
    shapes = [(2, 150, 6, 4), (2, 150, 6), (2, 150, groups, 5), (2, 150, groups, 5)]
    x, decay, b, c = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    given = (x, -F.softplus(decay), b, c)
    row = positions_of(DOCUMENTS) if packed else torch.arange(150).expand(2, -1)
    shared = HeadGroups(6, groups, ParallelState.alone())
    y, last = state_space(*given, runs_of(row if packed else None, b.flatten(2)), groups=shared)
    state, found = x.new_zeros(2, 6, 5, 4), []
    into, out = (one.repeat_interleave(6 // groups, dim=2) for one in (b, c))
    for t in range(150):
        state = state * (row[:, t] > 0)[:, None, None, None] * given[1][:, t, :, None, None].exp()
        state = state + torch.einsum("bhs,bhp->bhsp", into[:, t], x[:, t])
        found.append(torch.einsum("bhsp,bhs->bhp", state, out[:, t]))
    wanted = torch.stack(found, dim=1)
    check_alike((y, last), (wanted, state), (x, decay, b, c))


def test_a_convolution_of_one_token_needs_none_before():
    """Over a row, and token by token out of a cache."""
    layer = GatedDeltaNet(WIDTH, key_heads=2, value_heads=4, key_dim=3, value_dim=5, kernel_size=1).double()
    initialize(layer, 3, state=ParallelState.alone())
    x, positions = torch.randn(2, 6, WIDTH, dtype=torch.float64), torch.arange(6).repeat(2, 1)
    inputs = partial(AttentionInputs, like=x, state=layer.state)
    whole = layer(x, inputs(positions))
    cache, steps = KeyValueCache(2, 6), []
    for t in range(6):
        steps.append(layer(x[:, t : t + 1], inputs(positions[:, t : t + 1], cache)))
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-12, atol=1e-12)
    runs = Runs(inputs(positions), ParallelState.stand_in(Layout.of(context=2)))
    assert runs.tokens_before(x, 0) is None


def test_what_is_recomputed_keeps_its_inputs_alone():
    x = torch.randn(64, 64, requires_grad=True)

    def many(x):
        for _ in range(8):
            x = x.sin()
        return x

    with LiveBytes() as memory:
        y = recomputed(many, x)
    assert memory.now == y.nbytes
    (found,) = torch.autograd.grad(y.sum(), x)
    (wanted,) = torch.autograd.grad(many(x).sum(), x)
    assert torch.equal(found, wanted)
    few = x[:2, :2].detach().double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: recomputed(many, x), few)
