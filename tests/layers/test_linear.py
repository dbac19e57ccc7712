"""Column- and row-parallel linears: ``nn.Linear`` on one device, the same numbers in parts."""

import pytest
import torch
from support.compare_layers import compare_with_one_device
from torch import nn
from trilith.layers import ColumnParallelLinear, RowParallelLinear
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.testing import run_parallel


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_on_one_device_it_is_nn_linear(kind, bias):
    ours, theirs = kind(6, 10, bias), nn.Linear(6, 10, bias)
    assert {name: p.shape for name, p in ours.named_parameters()} == {
        name: p.shape for name, p in theirs.named_parameters()
    }
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 6, requires_grad=True)
    x_theirs = x.detach().clone().requires_grad_()
    y, y_theirs = ours(x), theirs(x_theirs)
    y.pow(2).sum().backward()
    y_theirs.pow(2).sum().backward()
    assert torch.equal(y, y_theirs) and torch.equal(x.grad, x_theirs.grad)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_named_outputs_are_separate_linears_of_one_input():
    layer = ColumnParallelLinear(6, {"q": 8, "k": 4}, unit=2)
    x = torch.randn(3, 6)
    q, k = layer(x)
    assert torch.equal(q, nn.functional.linear(x, layer.q.weight, layer.q.bias))
    assert torch.equal(k, nn.functional.linear(x, layer.k.weight, layer.k.bias))
    assert list(layer.state_dict()) == ["q.weight", "q.bias", "k.weight", "k.bias"]


def test_default_weights_are_spread_as_nn_linears():
    layer = ColumnParallelLinear(100, 4000)
    assert (
        float(layer.weight.detach().abs().max()) <= 0.1
        and abs(float(layer.weight.detach().std()) - 0.1 / 3**0.5) < 1e-3
    )
    assert 0.05 < float(layer.bias.detach().abs().max()) <= 0.1


@pytest.mark.parametrize(
    ("make", "found", "nearest"),
    [
        pytest.param(
            lambda s: ColumnParallelLinear(8, {"q": 24, "k": 24}, unit=4, state=s),
            "6 units of 4",
            "2 or 3",
            id="E1",
        ),
        pytest.param(
            lambda s: RowParallelLinear(24, 8, unit=4, state=s), "6 units of 4", "2 or 3", id="E1-out"
        ),
        pytest.param(
            lambda s: ColumnParallelLinear(8, {"up": 6}, state=s), "6 units of 1", "2 or 3", id="E3"
        ),
        pytest.param(lambda s: RowParallelLinear(6, 8, state=s), "6 units of 1", "2 or 3", id="E3-down"),
        pytest.param(
            lambda s: ColumnParallelLinear(8, 10, unit=4, state=s), "multiple of unit=4", "", id="unit"
        ),
        pytest.param(
            lambda s: ColumnParallelLinear(8, {"k": 12}, unit=4, shared=("k",), gather_output=True, state=s),
            "gather_output",
            "",
            id="gathered-shares",
        ),
    ],
)
def test_an_uneven_cut_is_refused_with_what_would_be_legal(make, found, nearest):
    with pytest.raises(BadInput) as error:
        make(ParallelState.stand_in(Layout.of(tensor=4)))
    assert found in str(error.value) and nearest in str(error.value)


def test_shared_outputs_may_be_fewer_than_the_ranks_E2():
    for rank, rows in enumerate([(4, 8), (4, 8), (4, 8), (4, 8)]):
        state = ParallelState.stand_in(Layout.of(tensor=4), rank)
        layer = ColumnParallelLinear(8, {"q": 16, "k": 4}, unit=4, shared=("k",), state=state)
        assert (layer.k.weight.shape, layer.q.weight.shape) == ((4, 8), (4, 8)), rows


def test_the_repr_shows_whole_and_local_sizes():
    state = ParallelState.stand_in(Layout.of(tensor=4), 1)
    column = ColumnParallelLinear(8, {"q": 16, "k": 8}, unit=4, shared=("k",), state=state)
    assert repr(column).splitlines()[1].strip() == (
        "in_features=8, out_features={'q': 16, 'k': 8}, here=(4, 8), (4, 8)"
    )
    assert "in_features=16, out_features=8, here=(8, 4)" in repr(RowParallelLinear(16, 8, state=state))
    assert "in_features=8, out_features=16, here=(4, 8)" in repr(ColumnParallelLinear(8, 16, state=state))


def both_linears(sequence, bias):
    """Compare each kind of linear on this rank with one device in fp64; return the largest differences."""
    world = torch.distributed.get_world_size()
    state = ParallelState.start(Layout.of(tensor=world, sequence=sequence))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(2, 8, 12)
    between = 1 if sequence else None  # the dim along which activations between the blocks are split

    def column(s):
        return ColumnParallelLinear(12, 20, bias, state=s)

    def named(s):
        return ColumnParallelLinear(12, {"gate": 20, "up": 8}, bias, state=s)

    def gathered(s):
        return ColumnParallelLinear(12, {"q": 20, "k": 8}, bias, gather_output=True, state=s)

    def row(s):
        return RowParallelLinear(12, 20, bias, state=s)

    def scattering(s):
        return RowParallelLinear(12, 20, bias, scatter_input=True, state=s)

    return [
        compare_with_one_device(column, x, state, input_dim=between, output_dim=-1),
        compare_with_one_device(named, x, state, input_dim=between, output_dim=-1),
        compare_with_one_device(gathered, x, state, input_dim=between),
        compare_with_one_device(row, x, state, input_dim=-1, output_dim=between),
        compare_with_one_device(scattering, x, state, output_dim=between),
    ]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_in_parts_it_equals_one_device(tensor, sequence, bias):
    for worst in run_parallel(both_linears, tensor, sequence, bias):
        assert len(worst) == 5 and max(worst) < 1e-13


def bias_sum():
    state = ParallelState.start(Layout.of(tensor=2))
    layer = RowParallelLinear(4, 3, state=state)
    return float(layer(torch.zeros(1, 2)).sum() - layer.bias.to_local().sum())


def test_the_bias_is_added_once_whatever_the_ranks():
    assert run_parallel(bias_sum, 2) == [0.0, 0.0]
