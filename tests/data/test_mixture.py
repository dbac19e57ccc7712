"""A mixture keeps to its shares at every prefix, and any position can be asked for on its own."""

import math
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from trilith.data.mixture import LONGEST_PERIOD, Interleave

weights = st.lists(
    st.one_of(
        st.integers(1, 60), st.sampled_from([0.1, 0.25, 0.7, 1e-3]), st.floats(1e-4, 1e4, allow_nan=False)
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=12, deadline=None)
@given(weights=weights)
def test_every_prefix_is_within_one_draw_of_the_shares(weights):
    mixing = Interleave(weights)
    length = min(2 * mixing.period, 70_000)
    sources, draws = mixing.locate(np.arange(length))
    for source, share in enumerate(mixing.shares):
        mine = sources == source
        given_so_far = np.cumsum(mine)
        # In whole numbers: |given - p * share / period| < 1.
        assert (np.abs(given_so_far * mixing.period - np.arange(1, length + 1) * share) < mixing.period).all()
        np.testing.assert_array_equal(draws[mine], np.arange(given_so_far[-1]))


@settings(max_examples=12, deadline=None)
@given(weights=weights, position=st.integers(0, 10**15))
def test_a_position_has_the_same_draw_alone_and_in_any_company(weights, position):
    mixing = Interleave(weights)
    alone = mixing.locate([position])
    among = Interleave(weights).locate([0, position, position + 1])
    assert (alone[0][0], alone[1][0]) == (among[0][1], among[1][1])


@settings(max_examples=25, deadline=None)
@given(weights=weights)
def test_shares_are_the_weights_or_the_nearest_that_a_period_holds(weights):
    mixing = Interleave(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    wanted = [weight / sum(exact) for weight in exact]
    shares = [Fraction(share, mixing.period) for share in mixing.shares]
    if math.lcm(*(f.denominator for f in wanted)) <= LONGEST_PERIOD:
        assert shares == wanted
    else:
        assert mixing.period == LONGEST_PERIOD
        limit = Fraction(max(2, len(weights)), LONGEST_PERIOD)
        assert all(abs(a - b) <= limit for a, b in zip(shares, wanted, strict=True))


def test_decimal_weights_mean_what_is_written():
    assert Interleave([0.7, 0.2, 0.1]).shares == [7, 2, 1]
    assert Interleave([1, 1]).shares == [1, 1]
    assert Interleave([3.0]).shares == [1]


def test_the_pattern_is_fixed_for_all_time():
    sources, draws = Interleave([0.5, 0.3, 0.2]).locate(np.arange(12))
    assert sources.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1]
    assert draws.tolist() == [0, 0, 1, 0, 2, 1, 3, 2, 4, 1, 5, 3]
