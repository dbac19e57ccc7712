"""Parameters that nobody declared: their first values, and saying afterwards how they are cut."""

import pytest
import torch
from torch import nn
from trilith.parallel_state import (
    BadInput,
    Constant,
    Cut,
    Declaration,
    Layout,
    ParallelState,
    declarations,
    declare,
    declare_parameter,
    initialize,
)


def made(seed):
    model = nn.Sequential(nn.Linear(6, 4), nn.GRU(4, 3), nn.Embedding(5, 3))
    initialize(model, seed)
    return model


def test_what_torch_made_begins_as_its_reset_parameters_does():
    first, again, other = (dict(made(seed).named_parameters()) for seed in (1, 1, 2))
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        assert not torch.equal(parameter, other[name])
    assert float(first["0.weight"].detach().abs().max()) <= 6**-0.5
    assert 0.3 < float(first["2.weight"].detach().std()) < 2


def test_a_declared_neighbour_keeps_its_own_initial():
    linear = nn.Linear(4, 4)
    declare(linear, "bias", initial=Constant(7.0))
    initialize(linear, 0)
    assert bool((linear.bias == 7).all())
    assert float(linear.weight.detach().abs().max()) <= 0.5


def test_a_parameter_whose_module_has_no_reset_is_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

    with pytest.raises(
        BadInput, match=r"0\.gain: expected an initial, or reset_parameters\(\) of its module"
    ):
        initialize(nn.Sequential(Scale()), 0)


def test_a_reset_that_forgets_a_parameter_is_named():
    class Half(nn.Linear):
        def reset_parameters(self):
            nn.init.ones_(self.weight)

    with pytest.raises(BadInput, match="bias: expected every value set"):
        initialize(Half(2, 2), 0)


def test_a_piece_is_declared_with_the_whole_and_filled_with_its_part():
    state = ParallelState.stand_in(Layout(tensor=2), 1)
    whole, piece = nn.Linear(6, 4, bias=False), nn.Linear(6, 2, bias=False)
    assert declare(piece, "weight", cut=Cut(0), state=state) == Declaration(
        (4, 6), cut=Cut(0), initial=declarations(whole)["weight"].initial
    )
    initialize(whole, 5)
    initialize(piece, 5, state=state)
    assert torch.equal(piece.weight, whole.weight[2:])


def test_declare_refuses_what_is_not_there():
    with pytest.raises(BadInput, match=r"weigth: expected a parameter among \['weight', 'bias'\]"):
        declare(nn.Linear(2, 2), "weigth")


def test_declarations_of_both_kinds_stand_beside_each_other():
    linear = nn.Linear(2, 2)
    declare_parameter(linear, "scale", Declaration((2,)), ParallelState.alone())
    assert declarations(linear)["scale"].initial == Constant(0.0)
    assert set(declarations(linear)) == {"weight", "bias", "scale"}
