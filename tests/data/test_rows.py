"""Rows of separate documents and of packed chat samples: what is learnt, where positions start."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_files import write_token_file
from trilith.data.batches import GlobalBatches, Mixture
from trilith.data.packing import one_a_row, pack
from trilith.data.rows import SampleRows, WindowRows
from trilith.layers import IGNORE

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


def test_separate_documents_restart_and_do_not_predict_each_other(tmp_path):
    file = write(tmp_path / "d", numbered(5), chat=False)  # starts: 0 1 3 6 10, 15 tokens
    rows = WindowRows(file, 7, separate=True)
    assert len(rows) == 2
    X = IGNORE
    assert filled(rows, 0) == ([0, 1, 2, 3, 4, 5, 6], [X, 2, X, 4, 5, X, 7], [0, 0, 1, 0, 1, 2, 0])
    assert filled(rows, 1) == ([7, 8, 9, 10, 11, 12, 13], [8, 9, X, 11, 12, 13, 14], [0, 1, 2, 0, 1, 2, 3])
    joined = WindowRows(file, 7, separate=False)
    assert filled(joined, 0) == (list(range(7)), list(range(1, 8)), list(range(7)))


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(documents=samples, length=st.integers(8, 20), packed=st.booleans())
def test_every_sample_stands_whole_in_one_row_and_only_targets_are_labels(
    tmp_path_factory, documents, length, packed
):
    if all(len(ids) == 1 for ids, _ in documents) or not any(any(learnt) for _, learnt in documents):
        return
    file = write(tmp_path_factory.mktemp("s") / "d", documents, chat=True)
    rows = SampleRows(file, length, packed=packed, overlong="refuse")
    stored = []
    for row in range(len(rows)):
        ids, labels, positions = filled(rows, row)
        starts = [at for at in range(length) if positions[at] == 0]
        assert positions == [at - max(s for s in starts if s <= at) for at in range(length)]
        taken = sum(len(documents[sample][0]) - 1 for sample in rows.rows[row].tolist())
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


@settings(max_examples=15, deadline=None)
@given(step=st.integers(0, 10**6))
def test_chat_and_text_in_one_mixture_are_cut_alike_for_any_number_of_ranks(tmp_path_factory, step):
    folder = tmp_path_factory.mktemp("mix")
    chat, text = (write(folder / name, numbered(9), chat=name == "chat") for name in ("chat", "text"))
    data = GlobalBatches(Mixture([(chat, 2), (text, 1)]), 10, 12, seed=5)
    whole = data.batch(step)
    assert whole.positions is not None
    for size in (2, 3, 4):
        pieces = [data.batch(step, rank, size) for rank in range(size)]
        for index, tensor in enumerate(whole):
            parts = [part for part in (piece[index] for piece in pieces) if part is not None]
            assert tensor is not None and torch.equal(torch.cat(parts), tensor)


def test_the_way_rows_are_made_is_part_of_the_fingerprint(tmp_path):
    chat, text = (write(tmp_path / name, numbered(9), chat=name == "chat") for name in ("chat", "text"))
    other = write(tmp_path / "other", [(ids, [0, *learnt[1:]]) for ids, learnt in numbered(9)], chat=True)
    single, separate = {"samples": "single"}, {"documents": "separate"}
    ways = [(chat, {}), (chat, single), (other, {}), (text, {}), (text, separate)]
    assert len({GlobalBatches(file, 10, 1, 0, **how).fingerprint for file, how in ways}) == 5


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


@settings(max_examples=300, deadline=None)
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


def test_packed_samples_of_ordinary_lengths_leave_little_padding():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 20_000).astype(int), 1, 2048)
    assert lengths.sum() / (len(pack(lengths, 2048)) * 2048) > 0.999


def test_one_sample_a_row():
    rows = one_a_row([4, 7])
    assert len(rows) == 2 and rows[0].tolist() == [4] and rows[1].tolist() == [7]
