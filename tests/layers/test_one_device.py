"""On one device a layer is its ``torch.nn`` counterpart: the same numbers, gradients, names and operators."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trilith.layers import (
    MLP,
    ColumnParallelLinear,
    Dropout,
    GatedMLP,
    LayerNorm,
    PositionEmbedding,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    causal_attention,
)
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import Operators

ALONE = {
    "no state": None,
    "one rank": ParallelState.stand_in(Layout()),
    "a data rank": ParallelState.stand_in(Layout.of(data=4, zero=3, sequence=True), 2),
}


class Plain(nn.Module):
    def __init__(self, gated):
        super().__init__()
        self.gate = nn.Linear(6, 10, False) if gated else None
        self.up, self.down = nn.Linear(6, 10, not gated), nn.Linear(10, 6, not gated)

    def forward(self, x):
        if self.gate is not None:
            gate, up = self.gate(x), self.up(x)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(self.up(x)))


class Positions(nn.Module):
    def __init__(self, ours, state=None):
        super().__init__()
        self.table = PositionEmbedding(8, 6, state=state) if ours else nn.Embedding(8, 6)

    def forward(self, x):
        places = torch.arange(x.shape[1])
        return self.table(x, places) if isinstance(self.table, PositionEmbedding) else x + self.table(places)


#: Ours, made from a state, and torch's. Ids of a vocabulary are checked on a CPU if its rows are padded, so
#: that one device has operators more; here no row is padded.
COUNTERPARTS = {
    "column": (lambda s: ColumnParallelLinear(6, 10, state=s), lambda: nn.Linear(6, 10)),
    "column without a bias": (
        lambda s: ColumnParallelLinear(6, 10, False, state=s),
        lambda: nn.Linear(6, 10, False),
    ),
    "row": (lambda s: RowParallelLinear(6, 10, state=s), lambda: nn.Linear(6, 10)),
    "row without a bias": (
        lambda s: RowParallelLinear(6, 10, False, state=s),
        lambda: nn.Linear(6, 10, False),
    ),
    "replicated": (lambda s: ReplicatedLinear(6, 8, state=s), lambda: nn.Linear(6, 8)),
    "embedding": (lambda s: VocabParallelEmbedding(128, 6, state=s), lambda: nn.Embedding(128, 6)),
    "positions": (lambda s: Positions(True, s), lambda: Positions(False)),
    "head": (lambda s: VocabParallelHead(6, 128, state=s), lambda: nn.Linear(6, 128, False)),
    "rms": (lambda s: RMSNorm(6, 1e-3, state=s), lambda: nn.RMSNorm(6, 1e-3)),
    "layer-norm": (lambda s: LayerNorm(6, 1e-3, state=s), lambda: nn.LayerNorm(6, 1e-3)),
    "dropout": (lambda s: Dropout(0.2, state=s), lambda: nn.Dropout(0.2)),
    "mlp": (lambda s: MLP(6, 10, state=s), lambda: Plain(False)),
    "gated": (lambda s: GatedMLP(6, 10, state=s), lambda: Plain(True)),
}
PAIRS = pytest.mark.parametrize("layer", COUNTERPARTS)


def inputs(layer, dtype=torch.float32):
    if layer == "embedding":
        return [torch.randint(128, (2, 5))] * 2
    x = torch.randn(2, 5, 6, dtype=dtype)
    return [x.clone().requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@PAIRS
def test_a_layer_has_the_numbers_of_torchs(layer, dtype):
    ours, theirs = (make.to(dtype) for make in (COUNTERPARTS[layer][0](None), COUNTERPARTS[layer][1]()))
    if layer in ("rms", "layer-norm"):
        assert all(map(torch.equal, ours.parameters(), theirs.parameters())), "they start as torch's"
        for p in ours.parameters():
            nn.init.normal_(p, 0.5)
    named = ours.state_dict()
    if not isinstance(theirs, Plain):
        assert {name: p.shape for name, p in named.items()} == {
            name: p.shape for name, p in theirs.state_dict().items()
        }
    theirs.load_state_dict(dict(zip(theirs.state_dict(), named.values(), strict=True)))
    results = []
    for module, x in zip((ours, theirs), inputs(layer, dtype), strict=True):
        torch.manual_seed(3)
        y = module(x)
        y.pow(2).sum().backward()
        assert y.dtype == dtype
        results.append([y, *(p.grad for p in (x, *module.parameters()) if p.requires_grad)])
    assert all(map(torch.equal, *results)) and len(results[0]) == len(results[1])


def launched(run):
    with Operators() as operators:
        y = run()
        parts = (y,) if isinstance(y, Tensor) else y
        torch.autograd.backward([part.sum() for part in parts])
    return Counter(operators.names)


@pytest.mark.parametrize("state", ALONE.values(), ids=ALONE)
@PAIRS
def test_a_layer_runs_exactly_torchs_operators(layer, state):
    """Forward and backward: so not one kernel more, nor a view."""
    ours, theirs = COUNTERPARTS[layer]
    mine, other, (x, same) = ours(state), theirs(), inputs(layer)
    assert launched(lambda: mine(x)) == launched(lambda: other(same))


def test_attention_is_one_operator_of_torch():
    mine, other = ([torch.ones(2, 4, 5, 8, requires_grad=True) for _ in range(3)] for _ in range(2))
    theirs = launched(lambda: F.scaled_dot_product_attention(*other, is_causal=True))
    assert launched(lambda: causal_attention(*mine)) == theirs


def test_default_weights_are_spread_as_nn_linears():
    layer = ColumnParallelLinear(100, 4000)
    assert (
        float(layer.weight.detach().abs().max()) <= 0.1
        and abs(float(layer.weight.detach().std()) - 0.1 / 3**0.5) < 1e-3
    )
    assert 0.05 < float(layer.bias.detach().abs().max()) <= 0.1
