"""Initial weights are a function of the seed and the name alone: the same bits in every layout.

So are those of parameters that nobody declared, of which one may say afterwards how they are cut.
"""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trilith.parallel_state import (
    BadInput,
    Box,
    Constant,
    Cut,
    Declaration,
    Layout,
    Normal,
    ParallelState,
    Uniform,
    declarations,
    declare,
    declare_parameter,
    initialize,
    seed_of,
)
from trilith.parallel_state import initial_weights as initial

_TILE_ELEMENTS = 256 * 4096


def part(box, shape, how, seed=1, dtype=torch.float32):
    local = torch.full(box.shape, float("nan"), dtype=dtype)
    initial.fill(local, box, shape, how, seed)
    return local


@st.composite
def boxes_of_shapes(draw):
    """Shapes around the tiles' edges, and any box of them, empty ones too."""
    edges = st.sampled_from([1, 3, 255, 256, 257, 600])
    shape = tuple(draw(st.lists(edges, max_size=2)))
    if draw(st.booleans()):
        shape = (2, *shape) if max(shape, default=0) < 500 else shape
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


@settings(max_examples=60)
@given(boxes_of_shapes(), st.sampled_from([Normal(0.02), Uniform(0.5), Constant(2.0)]))
def test_any_box_holds_its_part_of_the_whole_bit_for_bit(drawn, how):
    shape, box = drawn
    whole = part(Box.whole(shape), shape, how)
    assert torch.equal(part(box, shape, how), whole[box.slices])


def test_columns_past_one_tile_agree_as_well():
    shape = (3, 9000)
    whole = part(Box.whole(shape), shape, Normal(1.0))
    for start in range(0, 9000, 2250):
        box = Box((0, start), (3, start + 2250))
        assert torch.equal(part(box, shape, Normal(1.0)), whole[box.slices])
    assert whole.unique().numel() > 0.99 * whole.numel(), "tiles must not repeat each other"


def test_a_rank_draws_one_tile_at_a_time_and_only_those_that_it_touches():
    drawn = []
    real = initial._draw

    def count(shape, how, seed):
        drawn.append(torch.Size(shape).numel())
        return real(shape, how, seed)

    with patch.object(initial, "_draw", count):
        part(Box((300, 0), (301, 5)), (2048, 9000), Normal(1.0))
        assert drawn == [_TILE_ELEMENTS]
        drawn.clear()
        part(Box((250, 4000), (260, 4100)), (2048, 9000), Normal(1.0))
    assert drawn == [_TILE_ELEMENTS] * 4


def test_names_and_seeds_give_different_numbers():
    seeds = {seed_of(seed, name) for seed in (0, 1) for name in ("a.weight", "b.weight")}
    assert len(seeds) == 4 and all(0 <= seed < 2**63 for seed in seeds)
    first, second = (part(Box.whole((64,)), (64,), Normal(1.0), seed) for seed in list(seeds)[:2])
    assert not (first == second).any()


def test_a_seed_is_the_same_on_every_machine():
    assert seed_of(7, "layers.0.attention.out.weight") == 1456374995444259160


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_other_dtypes_hold_the_same_numbers_rounded(dtype):
    box = Box.whole((50, 50))
    assert torch.equal(
        part(box, (50, 50), Normal(1.0), dtype=dtype), part(box, (50, 50), Normal(1.0)).to(dtype)
    )


def test_distributions_have_the_stated_spread():
    shape = (600, 5000)
    normal = part(Box.whole(shape), shape, Normal(0.02))
    assert abs(float(normal.std()) / 0.02 - 1) < 2e-3 and abs(float(normal.mean())) < 5e-5
    kurtosis = float((normal / 0.02).pow(4).mean())
    assert abs(kurtosis - 3) < 0.05, "normal, not something else of that width"
    uniform = part(Box.whole(shape), shape, Uniform(0.5))
    assert float(uniform.min()) >= -0.5 and float(uniform.max()) <= 0.5
    assert abs(float(uniform.std()) / (1 / 12**0.5) - 1) < 2e-3


def made(seed):
    model = nn.Sequential(nn.Linear(6, 4), nn.GRU(4, 3), nn.Embedding(5, 3), nn.Linear(3, 5))
    model[3].weight = model[2].weight  # the output layer has a bias of its own
    initialize(model, seed)
    return model


def test_what_torch_made_begins_as_its_reset_parameters_does():
    first, again, other = (dict(made(seed).named_parameters()) for seed in (1, 1, 2))
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        assert not torch.equal(parameter, other[name])
    assert float(first["0.weight"].detach().abs().max()) <= 6**-0.5
    assert 0.3 < float(first["2.weight"].detach().std()) < 2
    assert 0.1 < float(first["3.bias"].detach().abs().max()) <= 3**-0.5 and "3.weight" not in first


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

    says = r"0\.gain: expected an initial, or reset_parameters\(\) of its module"
    with pytest.raises(BadInput, match=says):
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
    with pytest.raises(BadInput, match=r"0\.weight: expected a parameter among \[\]"):
        declare(nn.Sequential(nn.Linear(2, 2)), "0.weight")  # another module's


def test_declarations_of_both_kinds_stand_beside_each_other():
    linear = nn.Linear(2, 2)
    declare_parameter(linear, "scale", Declaration((2,)), ParallelState.alone())
    assert declarations(linear)["scale"].initial == Constant(0.0)
    assert set(declarations(linear)) == {"weight", "bias", "scale"}
