"""The order of samples: a permutation in each epoch by seed and epoch alone, and the shares of a mixture."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trilith.data.mixture import LONGEST_PERIOD, Interleave
from trilith.data.shuffle import ids_at, permute, positions_of

seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 1000)


@pytest.mark.parametrize("n", [*range(1, 70), 4096])
def test_small_and_power_of_two_sizes_are_permutations(n):
    """Of 4, 16, 64 and so on no number falls outside: a network that is none would send others round."""
    np.testing.assert_array_equal(np.sort(permute(np.arange(n), n, 3, 1)), np.arange(n))


@settings(max_examples=300, deadline=None)
@given(n=st.integers(1, 5000), seed=seeds, epoch=epochs)
def test_every_epoch_is_a_permutation(n, seed, epoch):
    np.testing.assert_array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 5000), seed=seeds, epoch=epochs, data=st.data())
def test_an_index_goes_to_the_same_place_alone_and_in_any_company(n, seed, epoch, data):
    indices = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    whole = permute(np.arange(n), n, seed, epoch)
    assert permute(indices, n, seed, epoch).tolist() == [whole[i] for i in indices]


def test_shape_is_kept_and_the_input_is_not_written_to():
    indices = np.arange(12).reshape(3, 4)
    out = permute(indices, 12, 1, 1)
    assert out.shape == (3, 4) and out.dtype == np.int64
    assert (indices == np.arange(12).reshape(3, 4)).all()


def test_seed_epoch_and_stream_each_change_the_order():
    base = permute(np.arange(1000), 1000, 1, 0)
    for other in (
        permute(np.arange(1000), 1000, 2, 0),
        permute(np.arange(1000), 1000, 1, 1),
        permute(np.arange(1000), 1000, 1, 0, stream=1),
    ):
        assert (base == other).mean() < 0.02


def test_every_order_of_four_samples_is_about_as_likely():
    found, counts = np.unique(
        [permute(np.arange(4), 4, seed, 0) for seed in range(2400)], axis=0, return_counts=True
    )
    assert len(found) == 24
    assert ((counts - 100.0) ** 2 / 100).sum() < 60  # chi-square with 23 degrees: 60 is one in 30,000


def test_neighbours_do_not_stay_together():
    order = permute(np.arange(100_000), 100_000, 5, 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02


def test_the_order_is_fixed_for_all_time():
    """A run resumed years later must find its samples where they were."""
    assert permute(np.arange(10), 10, 0, 0).tolist() == [7, 8, 5, 0, 2, 9, 3, 6, 4, 1]
    assert permute([0, 1, 10**12 - 1], 10**12, 1234, 5).tolist() == [532283900465, 843349098538, 492751948383]
    assert ids_at(positions_of(3, 6), 10, 7).tolist() == [4, 8, 0, 4, 9, 7]


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 200), batch=st.integers(1, 50), seed=seeds)
def test_steps_lie_end_to_end_over_the_epochs(n, batch, seed):
    ids = np.concatenate([ids_at(positions_of(step, batch), n, seed) for step in range(3 * n // batch + 1)])
    for epoch in range(len(ids) // n):
        np.testing.assert_array_equal(ids[epoch * n : (epoch + 1) * n], permute(np.arange(n), n, seed, epoch))


@pytest.mark.parametrize("n", [1, 3, 7], ids=lambda n: f"F3-{n}-samples-for-a-batch-of-16")
def test_a_batch_larger_than_the_data_wraps_over_epochs(n):
    ids = ids_at(positions_of(2, 16), n, seed=0)
    counts = np.bincount(ids, minlength=n)
    assert len(ids) == 16 and counts.min() >= 16 // n - 1 and counts.max() <= 16 // n + 2


def test_positions_far_out_need_no_walk_through_the_epochs():
    far = 10**15
    assert ids_at([far], 1000, 3)[0] == permute([far % 1000], 1000, 3, far // 1000)[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_ranks_pieces_in_order_are_the_whole(size):
    pieces = [positions_of(5, 12, rank, size) for rank in range(size)]
    np.testing.assert_array_equal(np.concatenate(pieces), np.arange(60, 72))


weight = st.integers(1, 60) | st.sampled_from([0.1, 0.25, 0.7, 1e-3]) | st.floats(1e-4, 1e4, allow_nan=False)
weights = st.lists(weight, min_size=1, max_size=8)


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
    alone = Interleave(weights).locate([position])
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
