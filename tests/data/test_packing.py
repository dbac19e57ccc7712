"""Packing: every sample once, in as few rows as best fit needs, each row within its room."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from trilith.data.packing import one_a_row, pack

cases = st.integers(1, 40).flatmap(
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


@settings(max_examples=300, deadline=None)
@given(case=cases)
def test_rows_are_those_of_best_fit_decreasing(case):
    room, lengths = case
    rows = pack(lengths, room)
    assert sorted(rows.samples.tolist()) == list(range(len(lengths)))
    taken = [sum(lengths[sample] for sample in rows[row]) for row in range(len(rows))]
    assert sorted(taken) == sorted(best_fit_decreasing(lengths, room))


def test_the_rows_are_fixed_for_all_time():
    """A run resumed years later must find its samples where they were."""
    rows = pack([3, 9, 1, 4, 4, 2, 10, 6, 1], 10)
    assert [rows[row].tolist() for row in range(len(rows))] == [[6], [1, 2], [7, 3], [4, 0, 5, 8]]


def test_samples_of_ordinary_lengths_leave_little_padding():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 20_000).astype(int), 1, 2048)
    rows = pack(lengths, 2048)
    assert lengths.sum() / (len(rows) * 2048) > 0.999


def test_one_a_row():
    rows = one_a_row([4, 7])
    assert len(rows) == 2 and rows[0].tolist() == [4] and rows[1].tolist() == [7]
