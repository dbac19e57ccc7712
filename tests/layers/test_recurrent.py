"""Recurrent layers: chunks against one token at a time, documents, context ranks, what is kept, FLOPs."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from trilith.layers import AttentionInputs, GatedDeltaNet, Mamba2, Tokens, cost_of, cut_sequence
from trilith.layers.head_groups import HeadGroups
from trilith.layers.recurrent.convolution import causal_convolution
from trilith.layers.recurrent.decay import CHUNK
from trilith.layers.recurrent.delta_rule import gated_delta_rule
from trilith.layers.recurrent.recompute import recomputed
from trilith.layers.recurrent.runs import Runs
from trilith.layers.recurrent.state_space import state_space
from trilith.parallel_state import (
    Layout,
    ParallelState,
    declarations,
    engine,
    finalize_gradients,
    initialize,
)
from trilith.parallel_state.engine import local_data
from trilith.testing import LiveBytes, run_parallel

HIDDEN = 24
#: Lengths of the documents of two rows of 150 tokens: three chunks, of which one holds several documents.
DOCUMENTS = ((64, 1, 20, 65), (150,))


def places(rows):
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


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


@pytest.mark.parametrize("packed", [False, True], ids=["one-document", "documents"])
def test_the_delta_rule_in_chunks_is_the_rule_token_by_token(packed):
    torch.manual_seed(0)
    shapes = [(2, 150, 2, 5), (2, 150, 2, 5), (2, 150, 6, 4), (2, 150, 6), (2, 150, 6)]
    q, k, v, decay, beta = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    given = (q, k, v, -F.softplus(decay), beta.sigmoid())
    row = places(DOCUMENTS) if packed else torch.arange(150).expand(2, -1)
    y, last = gated_delta_rule(*given, runs_of(row if packed else None, q.flatten(2)))
    wanted, state = one_by_one(*given, row)
    assert CHUNK < 150 and float((y - wanted).detach().abs().max()) <= 1e-12
    assert float((last.flatten(1, 2) - state).detach().abs().max()) <= 1e-12
    seed = torch.randn_like(y)
    found = torch.autograd.grad(y, (q, k, v, decay, beta), seed, retain_graph=True)
    for one, other in zip(found, torch.autograd.grad(wanted, (q, k, v, decay, beta), seed), strict=True):
        assert float((one - other).abs().max()) <= 1e-12 * float(other.abs().max())


@pytest.mark.parametrize("packed", [False, True], ids=["one-document", "documents"])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_state_space_in_chunks_is_the_recurrence_token_by_token(packed, groups):
    torch.manual_seed(0)
    shapes = [(2, 150, 6, 4), (2, 150, 6), (2, 150, groups, 5), (2, 150, groups, 5)]
    x, decay, b, c = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    given = (x, -F.softplus(decay), b, c)
    row = places(DOCUMENTS) if packed else torch.arange(150).expand(2, -1)
    shared = HeadGroups(6, groups, ParallelState.alone())
    y, last = state_space(*given, runs_of(row if packed else None, b.flatten(2)), groups=shared)
    state, found = x.new_zeros(2, 6, 5, 4), []
    into, out = (one.repeat_interleave(6 // groups, dim=2) for one in (b, c))
    for t in range(150):
        state = state * (row[:, t] > 0)[:, None, None, None] * given[1][:, t, :, None, None].exp()
        state = state + torch.einsum("bhs,bhp->bhsp", into[:, t], x[:, t])
        found.append(torch.einsum("bhsp,bhs->bhp", state, out[:, t]))
    wanted = torch.stack(found, dim=1)
    assert float((y - wanted).detach().abs().max()) <= 1e-12
    assert float((last - state).detach().abs().max()) <= 1e-12
    seed = torch.randn_like(y)
    grads = torch.autograd.grad(y, (x, decay, b, c), seed, retain_graph=True)
    for one, other in zip(grads, torch.autograd.grad(wanted, (x, decay, b, c), seed), strict=True):
        assert float((one - other).abs().max()) <= 1e-12 * float(other.abs().max())


def test_the_convolution_sees_the_tokens_before_in_its_document_alone():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 150, 3, dtype=torch.float64), torch.randn(3, 1, 4, dtype=torch.float64)
    bias, positions = torch.randn(3, dtype=torch.float64), places(DOCUMENTS)
    wanted = []
    for row, lengths in zip(x, DOCUMENTS, strict=True):
        pieces = [F.pad(piece.T, (3, 0)) for piece in row.split(lengths)]
        wanted.append(torch.cat([F.conv1d(piece, weight, bias, groups=3).T for piece in pieces]))
    whole = causal_convolution(x, weight, bias, None, positions)
    assert torch.allclose(whole, torch.stack(wanted), rtol=0, atol=1e-13)
    later = causal_convolution(x[:, 66:], weight, bias, x[:, 63:66], positions[:, 66:])
    assert torch.allclose(later, whole[:, 66:], rtol=0, atol=1e-13)
    plain = causal_convolution(x[1:, 66:], weight, bias, x[1:, 63:66], None)
    assert torch.allclose(plain, whole[1:, 66:], rtol=0, atol=1e-13)


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


def delta_net(state):
    made = GatedDeltaNet(
        HIDDEN, key_heads=2, value_heads=4, key_dim=3, value_dim=5, kernel_size=4, state=state
    ).double()
    initialize(made, 1, state=state)
    return made


def mamba(state):
    made = Mamba2(HIDDEN, heads=4, head_dim=3, state_dim=5, kernel_size=4, state=state).double()
    initialize(made, 1, state=state)
    return made


MAKE = {"delta-net": delta_net, "mamba": mamba}


def over_context(layer_name, layout, rows, length):
    """Return the largest difference to one device: outputs, the input's gradient, the parameters'."""
    state = ParallelState.start(layout)
    generator = torch.Generator().manual_seed(4)
    x, seed = (torch.randn(2, length, HIDDEN, dtype=torch.float64, generator=generator) for _ in range(2))
    positions = None if rows is None else places(rows)

    def run(layer, here):
        mine, grad = (cut_sequence(one, here).requires_grad_() for one in (x.clone(), seed))
        where = None if positions is None else cut_sequence(positions, here)
        y = layer(mine, AttentionInputs(where, like=mine, state=here))
        y.backward(grad.detach())
        assert mine.grad is not None
        return y.detach(), mine.grad

    whole, layer = MAKE[layer_name](None), MAKE[layer_name](state)
    wanted = [cut_sequence(one, state) for one in run(whole, ParallelState.alone())]
    found = [*run(layer, state)]
    finalize_gradients(layer, state=state)
    stated, parameters = declarations(layer), dict(layer.named_parameters())
    for name, one in whole.named_parameters():
        assert one.grad is not None
        box = stated[name].box(state.layout, state.at)
        wanted.append(one.grad[box.slices])
        found.append(engine.all_reduce(local_data(parameters[name].grad), state.context_group))
    pairs = zip(wanted, found, strict=True)
    return max(float((one - other).abs().max() / one.abs().max()) for one, other in pairs)


@pytest.mark.parametrize("layer", MAKE)
@pytest.mark.parametrize(
    ("layout", "rows", "length"),
    [
        # Runs of 72 tokens, two chunks; a document ends where a run does, and one within a chunk.
        (Layout.of(context=2), ((72, 100, 2, 114), (288,)), 288),
        (Layout.of(context=2, ring=True), None, 288),
        # Runs of two tokens, fewer than the convolution looks back.
        (Layout.of(context=2), ((5, 3), (8,)), 8),
        pytest.param(Layout.of(context=3, ring=True), ((7, 6, 5), (1, 17)), 18, marks=pytest.mark.slow),
        pytest.param(Layout.of(context=2, tensor=2), ((5, 3), (8,)), 8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_over_context_ranks_it_is_the_layer_of_one_device(layer, layout, rows, length):
    assert max(run_parallel(over_context, layout.world, layer, layout, rows, length)) <= 1e-11


def test_its_flops_are_those_that_torch_counts():
    """But for the triangular systems, which torch's counter passes over; it has the convolution's padding."""
    layer, tokens = delta_net(None), Tokens(2, 128, HIDDEN)
    x = torch.randn(2, 128, HIDDEN, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x, AttentionInputs(None, like=x, state=ParallelState.alone()))
    cost = cost_of(layer, tokens)
    systems, padding = tokens.count * CHUNK * 4 * (3 + 5), tokens.rows * 3 * 2 * 4 * (6 + 6 + 20)
    assert counter.get_total_flops() + systems - padding == cost.matrices + cost.other
