"""Rows of documents and of packed samples; their order, by seed and epoch, in the shares of a mixture."""

import math
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.draws import drawn
from support.token_files import write_token_file
from trilith.data.batches import GlobalBatches
from trilith.data.packing import pack
from trilith.data.rows import SampleRows, WindowRows
from trilith.data.sample_order import LONGEST_PERIOD, Interleave, ids_at, permute, positions_of
from trilith.layers import IGNORE
from trilith.training.run_data import separate_padding

samples = st.lists(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(*(st.lists(st.integers(0, most), min_size=n, max_size=n) for most in (999, 1)))
    ),
    min_size=1,
    max_size=20,
)


def write(name, documents, *, chat):
    ids, learnt = zip(*documents, strict=True)
    return write_token_file(name, ids, learnt if chat else None)


def filled(rows, row):
    ids, labels = np.zeros(rows.length, np.int64), np.full(rows.length, IGNORE, np.int64)
    positions = np.arange(rows.length)
    rows.fill(row, ids, labels, positions)
    return ids.tolist(), labels.tolist(), positions.tolist()


def numbered(count):
    """Documents of 1, 2, 3 and so on tokens, numbered through."""
    return [([n * (n - 1) // 2 + i for i in range(n)], [1] * n) for n in range(1, count + 1)]


@settings(max_examples=drawn(100), deadline=None)
@given(documents=samples, length=st.integers(1, 12))
def test_separate_windows_know_the_document_of_every_token(tmp_path_factory, documents, length):
    tokens = [token for ids, _ in documents for token in ids]
    owner = [number for number, (ids, _) in enumerate(documents) for _ in ids]
    if len(tokens) <= length:
        return
    rows = WindowRows(write(tmp_path_factory.mktemp("w") / "d", documents, chat=False), length, separate=True)
    for row in range(len(rows)):
        ids, labels, positions = filled(rows, row)
        begin = row * length
        for place in range(length):
            at = begin + place
            assert ids[place] == tokens[at]
            assert labels[place] == (tokens[at + 1] if owner[at + 1] == owner[at] else IGNORE)
            assert positions[place] == min(place, sum(owner[i] == owner[at] for i in range(at)))


@settings(max_examples=drawn(100), deadline=None)
@given(documents=samples, length=st.integers(8, 20), packed=st.booleans(), apart=st.booleans())
def test_every_sample_stands_whole_in_one_row_and_only_targets_are_labels(
    tmp_path_factory, documents, length, packed, apart
):
    if all(len(ids) == 1 for ids, _ in documents) or not any(any(learnt) for _, learnt in documents):
        return
    file = write(tmp_path_factory.mktemp("s") / "d", documents, chat=True)
    rows = SampleRows(file, length, packed=packed, overlong="refuse")
    rows.padding_separate = apart
    stored = []
    for row in range(len(rows)):
        ids, labels, positions = filled(rows, row)
        starts = [at for at in range(length) if positions[at] == 0]
        assert positions == [at - max(s for s in starts if s <= at) for at in range(length)]
        taken = sum(len(documents[sample][0]) - 1 for sample in rows.rows[row].tolist())
        assert (taken in starts) == (apart and taken < length)
        starts = [at for at in starts if at < taken]
        for start, end in zip(starts, [*starts[1:], taken], strict=True):
            stored.append((ids[start:end], labels[start:end]))
        assert set(ids[taken:]) <= {0} and set(labels[taken:]) <= {IGNORE}, "padding, of the last document"
    expected = [
        (ids[:-1], [token if counts else IGNORE for token, counts in zip(ids[1:], learnt[1:], strict=True)])
        for ids, learnt in documents
        if len(ids) > 1
    ]
    assert sorted(stored) == sorted(expected)
    if packed:
        assert len(rows) <= len(expected)
    else:
        assert len(rows) == len(expected)


def test_a_sample_that_no_row_holds_is_cut_or_left_out(tmp_path):
    file = write(tmp_path / "d", numbered(6), chat=True)
    cut = SampleRows(file, 4, packed=False, overlong="truncate")
    assert filled(cut, len(cut) - 1) == ([15, 16, 17, 18], [16, 17, 18, 19], [0, 1, 2, 3])
    left_out = SampleRows(file, 4, packed=False, overlong="drop")
    assert len(left_out) == len(cut) - 1
    whole = SampleRows(file, 5, packed=False, overlong="truncate")
    assert len({rows.fingerprint for rows in (cut, left_out, whole)}) == 3


def test_the_way_rows_are_made_is_part_of_the_fingerprint_and_says_which_share_rows(tmp_path):
    chat, text = (write(tmp_path / name, numbered(9), chat=name == "chat") for name in ("chat", "text"))
    other = write(tmp_path / "other", [(ids, [0, *learnt[1:]]) for ids, learnt in numbered(9)], chat=True)
    single, separate = {"samples": "single"}, {"documents": "separate"}
    ways = [(chat, {}), (chat, single), (other, {}), (text, {}), (text, separate)]
    made = [GlobalBatches(file, 10, 1, 0, **how) for file, how in ways]
    assert len({batches.fingerprint for batches in made}) == 5
    several = [
        bool((batches.rows(0, range(99)).positions[:, 1:] == 0).any()) for batches in made if batches.packed
    ]
    assert [batches.shared() for batches in made] == [True, False, True, False, True]
    assert several == [batches.shared() for batches in made if batches.packed]
    for batches in made:
        for row in range(batches.samples):
            one = batches.rows(0, range(row, row + 1))
            restarts = one.positions is not None and bool((one.positions[:, 1:] == 0).any())
            assert batches.resized(batches.samples).shared(range(row, row + 1)) == restarts


@pytest.mark.parametrize(("changes", "apart"), [((), False), ({10}, False), ({9, 30}, True)])
def test_padding_is_a_document_only_where_the_length_of_one_changes_the_angles(tmp_path, changes, apart):
    batches = GlobalBatches(write(tmp_path / "chat", numbered(9), chat=True), 10, 1, 0, samples="single")
    separate_padding(SimpleNamespace(rope_changes_at=changes), batches, None)
    assert bool((batches.rows(0, range(9)).positions[:, 1:] == 0).any()) == apart


lengths_in_a_room = st.integers(1, 40).flatmap(
    lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), max_size=80))
)


def best_fit_decreasing(lengths, room):
    """Compute how full each row is, as in the textbook, a sample at a time."""
    rows = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(rows)) if rows[row] + length <= room]
        if fitting:
            rows[max(fitting, key=rows.__getitem__)] += length
        else:
            rows.append(length)
    return rows


@settings(max_examples=drawn(300), deadline=None)
@given(case=lengths_in_a_room)
def test_packed_rows_are_those_of_best_fit_decreasing(case):
    room, lengths = case
    rows = pack(lengths, room)
    assert sorted(rows.samples.tolist()) == list(range(len(lengths)))
    taken = [sum(lengths[sample] for sample in rows[row]) for row in range(len(rows))]
    assert sorted(taken) == sorted(best_fit_decreasing(lengths, room))


def test_packed_rows_are_fixed_for_all_time():
    """A run resumed years later must find its samples where they were."""
    rows = pack([3, 9, 1, 4, 4, 2, 10, 6, 1], 10)
    assert [rows[row].tolist() for row in range(len(rows))] == [[6], [1, 2], [7, 3], [4, 0, 5, 8]]


seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 1000)


@settings(max_examples=drawn(300), deadline=None)
@given(n=st.integers(1, 70) | st.integers(1, 5000), seed=seeds, epoch=epochs)
@example(n=64, seed=3, epoch=1)  # no number falls outside: a network that is none would send others round
def test_every_epoch_is_a_permutation(n, seed, epoch):
    np.testing.assert_array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


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


def test_the_order_is_fixed_for_all_time():
    """A run resumed years later must find its samples where they were."""
    assert permute(np.arange(10), 10, 0, 0).tolist() == [7, 8, 5, 0, 2, 9, 3, 6, 4, 1]
    assert permute([0, 1, 10**12 - 1], 10**12, 1234, 5).tolist() == [532283900465, 843349098538, 492751948383]
    assert ids_at(positions_of(3, 6, range(6)), 10, 7).tolist() == [4, 8, 0, 4, 9, 7]


@settings(max_examples=drawn(25), deadline=None)
@given(n=st.integers(1, 200), batch=st.integers(1, 50), seed=seeds)
def test_steps_lie_end_to_end_over_the_epochs(n, batch, seed):
    rows, steps = range(batch), range(3 * n // batch + 1)
    ids = np.concatenate([ids_at(positions_of(step, batch, rows), n, seed) for step in steps])
    for epoch in range(len(ids) // n):
        np.testing.assert_array_equal(ids[epoch * n : (epoch + 1) * n], permute(np.arange(n), n, seed, epoch))


def test_a_batch_over_very_many_epochs_takes_time_by_its_rows_alone():
    began, seed = time.process_time(), 3
    ids = ids_at(np.arange(10**6)[::-1], 7, seed)[::-1]
    assert time.process_time() - began < 5
    assert (np.sort(ids[:999_999].reshape(-1, 7)) == np.arange(7)).all()
    np.testing.assert_array_equal(ids[-8:-1], permute(np.arange(7), 7, seed, 142_856))
    far = 10**15
    assert ids_at([far], 1000, 3)[0] == permute([far % 1000], 1000, 3, far // 1000)[0]


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


@settings(max_examples=drawn(25), deadline=None)
@given(weights=weights)
@example(weights=[1.0] + [1e-9] * 5)  # each of the small ones takes a draw from the large one
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


def test_the_pattern_is_fixed_for_all_time():
    sources, draws = Interleave([0.5, 0.3, 0.2]).locate(np.arange(12))
    assert sources.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1]
    assert draws.tolist() == [0, 0, 1, 0, 2, 1, 3, 2, 4, 1, 5, 3]
