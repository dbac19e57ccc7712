"""Choosing tokens: the likeliest, or by chance from those that temperature, top_k and top_p leave."""

import pytest
import torch
from trilith.generation import Sampling
from trilith.generation.sampling import choose
from trilith.parallel_state import BadInput

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]])


def frequencies(banned=(), **how):
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = choose(LOGITS.expand(20_000, -1), Sampling(**how), uniform=uniform, banned=banned)
    return torch.bincount(drawn, minlength=5) / len(drawn)


def test_at_temperature_0_it_is_the_likeliest():
    assert choose(LOGITS, Sampling()).tolist() == [0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_above_it_draws_as_the_softmax_says(temperature):
    expected = (LOGITS[0] / temperature).softmax(-1)
    torch.testing.assert_close(frequencies(temperature=temperature), expected, atol=0.012, rtol=0)


def test_top_k_leaves_the_k_likeliest():
    found = frequencies(temperature=1.0, top_k=2)
    torch.testing.assert_close(found[:2], LOGITS[0, :2].softmax(-1), atol=0.012, rtol=0)
    assert not found[2:].any()


def test_top_p_leaves_the_smallest_set_that_holds_so_much():
    # 0.64, 0.24, 0.09, 0.03: two of them hold 0.7, and the likeliest alone holds 0.6
    found = frequencies(temperature=1.0, top_p=0.7)
    assert found[:2].all() and not found[2:].any()
    assert frequencies(temperature=1.0, top_p=0.6).tolist() == [1, 0, 0, 0, 0]


def test_a_banned_token_never_comes_and_the_others_share_its_probability():
    assert choose(LOGITS, Sampling(), banned=(0, 1)).tolist() == [2]
    found = frequencies(banned=(0,), temperature=1.0, top_k=2)
    torch.testing.assert_close(found[1:3], LOGITS[0, 1:3].softmax(-1), atol=0.012, rtol=0)
    assert not found[[0, 3, 4]].any()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_scale_give_a_token_that_has_a_probability(uniform):
    logits = torch.full((1, 1000), -200.0)
    logits[0, 300:600] = torch.randn(300, generator=torch.Generator().manual_seed(0))
    (drawn,) = choose(logits, Sampling(1.0, top_p=0.999), uniform=torch.tensor([uniform]).double()).tolist()
    assert 300 <= drawn < 600


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected a number from 0 up"),
        ({"temperature": float("nan")}, "temperature: expected a number from 0 up"),
        ({"top_k": -1}, "top_k: expected 0 or more"),
        ({"top_p": 0.0}, "top_p: expected above 0"),
        ({"top_p": 1.5}, "top_p: expected above 0"),
    ],
)
def test_refusals(how, message):
    with pytest.raises(BadInput, match=message):
        Sampling(**how)
