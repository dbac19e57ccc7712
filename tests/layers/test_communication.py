"""Layers in parts launch only the stated collectives, and send only the stated bytes."""

import pytest
import torch
import torch.distributed as dist
from support.configs import config
from trilith.layers import (
    AttentionScope,
    ColumnParallelLinear,
    causal_attention,
    vocab_parallel_cross_entropy,
)
from trilith.models import LLAMA
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import Operators, run_parallel

B, S, D, V = 2, 12, 16, 512


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
    raw = config("tiniest_llama", vocab_size=503, tie_word_embeddings=False)
    model = LLAMA.build(LLAMA.from_hf(raw), state=state, device="cpu")
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
        assert (backward, sent_back) == ({"exchange": 2 * others}, {"exchange": 2 * others * n})


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_logits_are_never_gathered(sequence):
    assert run_parallel(largest_tensor, 2, sequence) == [B * S * V // 2] * 2, "a rank's own logits"
