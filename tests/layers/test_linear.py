"""Linears of one rank: outputs, sizes, the bias, and a backward in which gradients travel during products."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trilith.layers import (
    ClampedExperts,
    ColumnParallelLinear,
    Dropout,
    Experts,
    HeadsRMSNorm,
    LayerNorm,
    PositionEmbedding,
    RotaryEmbedding,
    RowParallelLinear,
    TopKRouter,
    VocabParallelEmbedding,
    VocabParallelHead,
    attach_expert_lora,
    attach_lora,
    gather_sequence,
    scatter_sequence,
)
from trilith.layers.collectives import own_piece
from trilith.parallel_state import Layout, Normal, ParallelState, initialize, local
from trilith.parallel_state.engine import local_data
from trilith.testing import LiveBytes, Operators, run_parallel


def test_named_outputs_are_separate_linears_of_one_input():
    layer = ColumnParallelLinear(6, {"q": 8, "k": 4}, unit=2)
    x = torch.randn(3, 6)
    for y, part in zip(layer(x), (layer.q, layer.k), strict=True):
        assert torch.equal(y, nn.functional.linear(x, part.weight, part.bias))
    assert list(layer.state_dict()) == ["q.weight", "q.bias", "k.weight", "k.bias"]


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (partial(RowParallelLinear, 16, 8), "in_features=16, out_features=8, bias=True, here=(8, 4)"),
        (
            partial(ColumnParallelLinear, 8, 16, False),
            "in_features=8, out_features=16, bias=False, here=(4, 8)",
        ),
        (
            partial(ColumnParallelLinear, 8, {"q": 16, "k": 8}, unit=4, shared=("k",)),
            "in_features=8, out_features={'q': 16, 'k': 8}, bias=True, here=(4, 8), (4, 8)",
        ),
        (partial(VocabParallelHead, 8, 503), "503, 8, padded=512, here=(128, 8)"),
        (partial(VocabParallelEmbedding, 503, 8), "503, 8, padded=512, here=(128, 8)"),
        (partial(PositionEmbedding, 64, 8), "64, 8"),
        (partial(Dropout, 0.1), "p=0.1"),
        (partial(LayerNorm, 8), "8, eps=1e-05"),
        (partial(HeadsRMSNorm, 8, 4), "8 x 4, eps=1e-06"),
        (partial(TopKRouter, 8, 4, 2), "4 experts, top_k=2, score=softmax"),
        (partial(Experts, 4, 8, 16), "here=(4, 4, 8)"),
        (partial(ClampedExperts, 4, 8, 16, initial=Normal(1.0)), "here=(4, 8, 8), alpha=1.702, limit=7.0"),
        (lambda state: RotaryEmbedding(8, 1e4), "8, theta=10000.0, scaling=None"),
        (lambda state: state, "tensor 4; rank 1 of 4"),
    ],
)
def test_the_repr_shows_whole_and_local_sizes(make, arguments):
    layer = make(state=ParallelState.stand_in(Layout.of(tensor=4), 1))
    shown = "".join(line.strip() for line in repr(layer).splitlines())
    assert shown.startswith(f"{type(layer).__name__}({arguments}")


LAYOUTS = [Layout.of(tensor=2), Layout.of(tensor=2, sequence=True)]


def backward_of(layout, kind):
    state = ParallelState.start(layout)
    if kind == "linear":
        layer = ColumnParallelLinear(8, {"a": 6, "b": 4}, state=state)
    else:
        layer = VocabParallelHead(8, 128, state=state)
    y = layer(torch.randn(2, 4, 8, requires_grad=True))
    total = sum(one.square().sum() for one in y) if isinstance(y, tuple) else y.square().sum()
    with Operators() as seen:
        total.backward()
    return seen.names


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["linear", "head"])
def test_the_gradients_of_the_weights_are_computed_while_the_input_s_is_summed(layout, kind):
    products = 2 if kind == "linear" else 1
    for names in run_parallel(backward_of, 2, layout, kind):
        kinds = ("_c10d_functional::all_reduce_", "_c10d_functional::reduce_scatter_tensor")
        (start,) = (number for number, name in enumerate(names) if name in kinds)
        wait = names.index("_c10d_functional::wait_tensor")
        multiplied = [number for number, name in enumerate(names) if name in ("aten::mm", "aten::bmm")]
        assert len(multiplied) == 2 * products
        assert sum(number < start for number in multiplied) == products, "the input's gradients come first"
        assert all(number < wait for number in multiplied), "and the wait comes last"
        assert names.count("aten::add_") == products - 1 and "aten::add" not in names, "in its own memory"


def backward_in_two(layout):
    """Return the operators of the two parts of a backward, as the pipeline's schedules cut it."""
    state = ParallelState.start(layout)
    layer = ColumnParallelLinear(8, {"a": 6, "b": 4}, state=state)
    x = torch.randn(2, 4, 8, requires_grad=True)
    total = sum(one.square().sum() for one in layer(x * 2))
    weights, found = [*layer.parameters()], []
    for asked in ([x], weights):
        with Operators() as seen:
            torch.autograd.grad(total, asked, retain_graph=True)
        found.append(seen.names)
    whole = torch.autograd.grad(total, [x, *weights], retain_graph=True)
    parts = [*torch.autograd.grad(total, [x], retain_graph=True), *torch.autograd.grad(total, weights)]
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    return found


def held_in_backward(layout):
    """Return the most bytes in a backward, and those of gradients: of weights, whole input and its piece."""
    state = ParallelState.start(layout)
    layer = ColumnParallelLinear(32, {"a": 512, "b": 512}, False, state=state)
    x = torch.randn(1, 64, 32, requires_grad=True)
    outputs = layer(x * 1)
    seeds = [torch.ones_like(y) for y in outputs]
    with LiveBytes() as memory:
        torch.autograd.backward(outputs, seeds)
    of_weights = sum(local_data(weight.grad).nbytes for weight in layer.parameters())
    return memory.peak, of_weights + (layout.tensor if state.sequence else 1) * x.nbytes + x.nbytes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_backward_holds_one_gradient_of_the_input_and_its_sum_beside_those_of_weights(layout):
    for peak, expected in run_parallel(held_in_backward, 2, layout):
        assert peak == expected


def derivative_of_a_weight_s_gradient(layout):
    """Return the gradient of the input of a function of the weight's gradient, as in MAML."""
    torch.set_default_dtype(torch.float64)
    state = ParallelState.start(layout)
    layer = ColumnParallelLinear(6, 8, False, state=state)
    initialize(layer, 0, state=state)
    x, factor = torch.linspace(-1, 1, 48).view(2, 4, 6), torch.linspace(1, 2, 48).view(8, 6)
    x = own_piece(x, 1, state.tensor.group) if state.sequence else x
    x.requires_grad_()
    (of_weight,) = torch.autograd.grad(layer(x).square().sum(), layer.weight, create_graph=True)
    factor = factor.chunk(layout.tensor)[state.tensor.index]
    return torch.autograd.grad((local(of_weight) * factor).sum(), x)[0]


def test_gradients_of_a_weight_s_gradient_are_those_of_one_process():
    (whole,) = run_parallel(derivative_of_a_weight_s_gradient, 1, Layout())
    for x in run_parallel(derivative_of_a_weight_s_gradient, 2, Layout(tensor=2)):
        torch.testing.assert_close(x, whole)
    pieces = run_parallel(derivative_of_a_weight_s_gradient, 2, Layout.of(tensor=2, sequence=True))
    torch.testing.assert_close(torch.cat(pieces, 1), whole)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_backward_in_two_parts_computes_and_sends_each_gradient_once(layout):
    for inputs, weights in run_parallel(backward_in_two, 2, layout):
        assert [sum("c10d" in name for name in names) for names in (inputs, weights)] == [2, 0]  # and a wait
        assert [sum(name == "aten::mm" for name in names) for names in (inputs, weights)] == [2, 2]


def copies_of(rows):
    state = ParallelState.start(Layout.of(tensor=2, sequence=True))
    with Operators() as seen:
        x = torch.randn(rows, 4, 8, requires_grad=True)
        scatter_sequence(gather_sequence(x, state), state).sum().backward()
    return sum(name in ("aten::cat", "aten::copy_", "aten::clone") for name in seen.names)


def test_of_one_row_the_pieces_of_a_sequence_are_not_copied():
    assert run_parallel(copies_of, 2, 1) == [1, 1]  # the gradient of a sum is broadcast
    assert all(count > 4 for count in run_parallel(copies_of, 2, 2))


def test_an_adapter_adds_the_scaled_product_and_starts_at_nothing():
    layer = ColumnParallelLinear(6, {"q": 8, "k": 4})
    plain = layer(x := torch.randn(3, 6))
    attach_lora(layer, r=2, alpha=8, outputs=["q"])
    assert all(torch.equal(a, b) for a, b in zip(plain, layer(x), strict=True))
    a = layer.q.lora_A.detach()
    assert a.shape == (2, 6) and 0.2 < float(a.abs().max()) <= 1 / 6**0.5
    nn.init.normal_(layer.q.lora_B)
    q, k = layer(x)
    torch.testing.assert_close(q, plain[0] + 4 * (x @ a.T @ layer.q.lora_B.T))
    assert torch.equal(k, plain[1])
    row = RowParallelLinear(6, 5)
    attach_lora(row, r=4, alpha=8, rslora=True)
    before = row(x).detach()
    nn.init.normal_(row.lora_B)
    torch.testing.assert_close(row(x), before + 4 * (x @ row.lora_A.T @ row.lora_B.T))


def test_outputs_attached_together_share_one_a():
    layer = ColumnParallelLinear(6, {"q": 8, "k": 4})
    attach_lora(layer, r=2, alpha=2)
    assert sorted(dict(layer.named_parameters())) == sorted(
        ["q.weight", "q.bias", "k.weight", "k.bias", "lora_A", "q.lora_B", "k.lora_B"]
    )


def masks(sequence):
    """Return the dropout masks of the adapters of both kinds of linear, and the generator's next number."""
    state = ParallelState.start(Layout.of(tensor=2, sequence=sequence))
    column, row = ColumnParallelLinear(64, 2, state=state), RowParallelLinear(128, 2, state=state)
    for layer in (column, row):
        attach_lora(layer, r=64, alpha=64, dropout=0.5)
        local_data(layer.lora_A).copy_(torch.eye(64, 128)[:, :64])
    torch.manual_seed(5)
    seen = []
    with torch.no_grad():
        for layer, adapter in ((column, column.adapters[0]), (row, row.adapters[0])):
            local_data(layer.lora_B).fill_(1.0)
            (change,) = adapter(torch.eye(64)).values()
            seen.append(change[:, 0].clone())
    return seen[0], seen[1], int(torch.randint(2**62, ()))


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_masks_agree_where_the_input_is_shared_and_differ_where_it_is_cut(sequence):
    (column, row, after), (other_column, other_row, other_after) = run_parallel(masks, 2, sequence)
    assert torch.equal(column, other_column) and not torch.equal(row, other_row)
    assert after == other_after
    for mask in (column, row, other_row):
        assert set(mask.tolist()) == {0.0, 2.0}


def test_dropout_of_an_adapter_is_for_training():
    layer = RowParallelLinear(6, 5, False)
    attach_lora(layer, r=2, alpha=2, dropout=0.5)
    nn.init.normal_(layer.eval().lora_B)
    x = torch.randn(4, 6)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight + layer.lora_B @ layer.lora_A))


def test_an_adapter_of_experts_adds_the_scaled_product_of_each_expert():
    experts = Experts(3, 6, 8).double()
    x, counts = torch.randn(7, 6, dtype=torch.float64), [2, 0, 5]
    plain = experts(x, counts)
    attach_expert_lora(experts, ["gate", "up"], r=2, alpha=8)
    attach_expert_lora(experts, ["down"], r=4, alpha=8, rslora=True)
    experts.double()
    assert torch.equal(experts(x, counts), plain)
    for name, one in experts.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(one)
    merged = Experts(3, 6, 8).double()
    with torch.no_grad():
        for output, a in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down")):
            factors = getattr(experts, f"lora_B_{output}") @ getattr(experts, f"lora_A_{a}")
            getattr(merged, output).copy_(getattr(experts, output) + 4 * factors)
    torch.testing.assert_close(experts(x, counts), merged(x, counts))
    assert float((experts(x, counts) - plain).detach().abs().max()) > 1e-2
