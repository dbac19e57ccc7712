"""Check that layers launch what ``torch.nn`` does on one device, and in parts only the stated collectives."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from trilith.layers import (
    MLP,
    AttentionScope,
    ColumnParallelLinear,
    Dropout,
    GatedMLP,
    LayerNorm,
    PositionEmbedding,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    causal_attention,
    vocab_parallel_cross_entropy,
)
from trilith.models import LLAMA
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import LiveBytes, Operators, run_parallel

LLAMA_TINY = {
    "model_type": "llama",
    "vocab_size": 503,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
B, S, D, V = 2, 12, 16, 512


def launched(run):
    with Operators() as operators:
        y = run()
        parts = (y,) if isinstance(y, Tensor) else y
        torch.autograd.backward([part.sum() for part in parts])
    return operators.names


ALONE = {
    "no state": None,
    "one rank": ParallelState.stand_in(Layout()),
    "a data rank": ParallelState.stand_in(Layout.of(data=4, zero=3, sequence=True), 2),
}


class Plain(nn.Module):
    """An MLP of ``nn.Linear``, gated or not."""

    def __init__(self, gated):
        super().__init__()
        self.gate = nn.Linear(6, 10, False) if gated else None
        self.up, self.down = nn.Linear(6, 10, not gated), nn.Linear(10, 6, not gated)

    def forward(self, x):
        if self.gate is not None:
            gate, up = self.gate(x), self.up(x)
            gated = self.down(F.silu(gate) * up)
            return gated
        plain = self.down(F.gelu(self.up(x)))
        return plain


class Added(nn.Embedding):
    """Learned positions, added."""

    def forward(self, x):
        return x + super().forward(torch.arange(x.shape[1]))


COUNTERPARTS = {
    "column": (lambda s: ColumnParallelLinear(6, 10, state=s), lambda: nn.Linear(6, 10)),
    "row": (lambda s: RowParallelLinear(6, 10, False, state=s), lambda: nn.Linear(6, 10, False)),
    "gathered": (lambda s: ColumnParallelLinear(6, 8, gather_output=True, state=s), lambda: nn.Linear(6, 8)),
    "split": (lambda s: RowParallelLinear(6, 8, scatter_input=True, state=s), lambda: nn.Linear(6, 8)),
    "head": (lambda s: VocabParallelHead(6, 128, state=s), lambda: nn.Linear(6, 128, False)),
    "rms": (lambda s: RMSNorm(6, state=s), lambda: nn.RMSNorm(6, 1e-6)),
    "layer-norm": (lambda s: LayerNorm(6, state=s), lambda: nn.LayerNorm(6)),
    "dropout": (lambda s: Dropout(0.2, state=s), lambda: nn.Dropout(0.2)),
    "mlp": (lambda s: MLP(6, 10, state=s), lambda: Plain(False)),
    "gated": (lambda s: GatedMLP(6, 10, state=s), lambda: Plain(True)),
}


@pytest.mark.parametrize("state", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("layer", COUNTERPARTS)
def test_on_one_device_exactly_torchs_operators_run(layer, state):
    """Forward and backward, in order: so not one kernel more, nor a view."""
    ours, theirs = COUNTERPARTS[layer]
    mine, other = ours(state), theirs()
    x, same = (torch.ones(2, 5, 6, requires_grad=True) for _ in range(2))
    assert launched(lambda: mine(x)) == launched(lambda: other(same))


@pytest.mark.parametrize("state", ALONE.values(), ids=ALONE)
def test_on_one_device_embeddings_are_torchs_operators(state):
    """Ids are checked on a CPU if rows are padded, and nowhere else; here no row is padded."""
    ids = torch.randint(128, (2, 5))
    ours, theirs = VocabParallelEmbedding(128, 6, state=state), nn.Embedding(128, 6)
    assert launched(lambda: ours(ids)) == launched(lambda: theirs(ids))
    position, added = PositionEmbedding(8, 6, state=state), Added(8, 6)
    x, same = (torch.ones(2, 5, 6, requires_grad=True) for _ in range(2))
    assert launched(lambda: position(x, torch.arange(5))) == launched(lambda: added(same))


def test_on_one_device_attention_is_one_operator_of_torch():
    mine, other = ([torch.ones(2, 4, 5, 8, requires_grad=True) for _ in range(3)] for _ in range(2))
    theirs = launched(lambda: F.scaled_dot_product_attention(*other, is_causal=True))
    assert launched(lambda: causal_attention(*mine)) == theirs


def test_on_one_device_the_loss_needs_less_than_torchs_and_sends_nothing():
    """Only this layer has operators of its own: they work in place and save a tensor of the logits' size."""
    labels = torch.randint(512, (2, 64))

    def ours(x):
        return vocab_parallel_cross_entropy(x, labels, 512)

    def theirs(x):
        return F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none")

    peaks = []
    for loss in (ours, theirs):
        x = torch.randn(2, 64, 512, requires_grad=True)
        with LiveBytes() as memory:
            loss(x).sum().backward()
        peaks.append(memory.peak)
    assert peaks[0] < 1.1 * 2 * x.nbytes < 2.9 * x.nbytes < peaks[1]
    assert not [name for name in launched(lambda: ours(x)) if "c10d" in name]


def named_outputs(sequence):
    state = ParallelState.start(Layout.of(tensor=dist.get_world_size(), sequence=sequence))
    layer = ColumnParallelLinear(D, {"q": 16, "k": 8, "v": 8}, state=state)
    x = torch.randn(B, S // (2 if sequence else 1), D, requires_grad=True)
    with Operators() as forward:
        outputs = layer(x)
    with Operators() as backward:
        torch.autograd.backward([y.sum() for y in outputs])
    return forward.collectives, backward.collectives


def test_several_outputs_of_one_input_pay_one_collective():
    for forward, backward in run_parallel(named_outputs, 2, False):
        assert (forward, backward) == ({}, {"all_reduce": 1})
    for forward, backward in run_parallel(named_outputs, 2, True):
        assert (forward, backward) == ({"all_gather": 1}, {"reduce_scatter": 1})


def largest_tensor(sequence):
    """Return the size, in numbers, of the largest tensor made on a rank in forward, loss and backward."""
    state = ParallelState.start(Layout.of(tensor=dist.get_world_size(), sequence=sequence))
    model = LLAMA.build(LLAMA.from_hf(LLAMA_TINY), state=state, device="cpu")
    ids = torch.randint(503, (B, S))
    with Operators() as operators:
        torch.autograd.backward(vocab_parallel_cross_entropy(model(ids), ids, 503, state=state).sum())
    return operators.largest


def attention_over_context(ring):
    """Run one layer's attention, with two key/value heads for four query heads."""
    state = ParallelState.start(Layout.of(context=dist.get_world_size(), ring=ring))
    here, scope = S // state.context_size, AttentionScope(state=state)
    q, k, v = (torch.randn(B, heads, here, 8, requires_grad=True) for heads in (4, 2, 2))
    with Operators() as forward:
        out = causal_attention(q, k, v, scope)
    with Operators() as backward:
        torch.autograd.backward(out.sum())
    return (forward.collectives, forward.sent), (backward.collectives, backward.sent)


@pytest.mark.parametrize("context", [2, 3])
def test_context_ranks_send_key_value_heads_and_their_gradients_once(context):
    """The numbers are those of docs/context.md. A rank's keys and values are n bytes."""
    n, others = 4 * 2 * B * 2 * 8 * S // context, context - 1
    for (forward, sent), (backward, sent_back) in run_parallel(attention_over_context, context, False):
        assert (forward, sent) == ({"all_gather": 1}, {"all_gather": n})
        assert backward == {"all_gather": 1, "reduce_scatter": 1}
        assert sent_back == {"all_gather": n, "reduce_scatter": context * n}
    for (forward, sent), (backward, sent_back) in run_parallel(attention_over_context, context, True):
        assert (forward, sent) == ({"exchange": others}, {"exchange": others * n})
        assert (backward, sent_back) == (
            {"exchange": 2 * others},
            {"exchange": 2 * others * n},
        )


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_logits_are_never_gathered(sequence):
    assert run_parallel(largest_tensor, 2, sequence) == [B * S * V // 2] * 2, "a rank's own logits"
