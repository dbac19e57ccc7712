"""Linears of one rank: outputs, sizes, the bias, and a backward in which gradients travel during products."""

import pytest
import torch
from torch import nn
from trilith.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelHead,
    gather_sequence,
    scatter_sequence,
)
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import Operators, run_parallel


def test_named_outputs_are_separate_linears_of_one_input():
    layer = ColumnParallelLinear(6, {"q": 8, "k": 4}, unit=2)
    x = torch.randn(3, 6)
    for y, part in zip(layer(x), (layer.q, layer.k), strict=True):
        assert torch.equal(y, nn.functional.linear(x, part.weight, part.bias))
    assert list(layer.state_dict()) == ["q.weight", "q.bias", "k.weight", "k.bias"]


def test_the_repr_shows_whole_and_local_sizes():
    state = ParallelState.stand_in(Layout.of(tensor=4), 1)
    column = ColumnParallelLinear(8, {"q": 16, "k": 8}, unit=4, shared=("k",), state=state)
    assert repr(column).splitlines()[1].strip() == (
        "in_features=8, out_features={'q': 16, 'k': 8}, here=(4, 8), (4, 8)"
    )
    assert "in_features=16, out_features=8, here=(8, 4)" in repr(RowParallelLinear(16, 8, state=state))
    assert "in_features=8, out_features=16, here=(4, 8)" in repr(ColumnParallelLinear(8, 16, state=state))


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


def test_layers_on_one_rank_run_as_many_operators_as_torch_s():
    ours = ColumnParallelLinear(16, 64, bias=False), RowParallelLinear(64, 16, bias=False)
    counts = []
    for up, down in (ours, (nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False))):
        with Operators() as seen:
            down(up(torch.ones(1, 8, 16, requires_grad=True)).relu()).sum().backward()
        counts.append(len(seen.names))
    assert counts[0] == counts[1]
