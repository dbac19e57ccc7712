"""Batches: windows of the tokens, the same for any number of data ranks; by the step alone; made ahead."""

import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draws import drawn
from support.short_runs import losses, tiny_recipe, train
from support.token_files import batch_at, write_token_file
from trilith.data import Batch
from trilith.data.batch import BatchParts
from trilith.data.batches import GlobalBatches, MicroBatches, prefetched
from trilith.data.sample_order import ids_at, positions_of
from trilith.data.token_writer import TokenWriter
from trilith.layers import IGNORE
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput, Layout
from trilith.recipes.section import MOST_ROWS
from trilith.testing import RankError

CPU = torch.device("cpu")


def numbers(name, count, first=0, fingerprint="t"):
    """Write a file whose token number ``i`` is ``first + i``."""
    tokens = np.arange(first, first + count)
    return write_token_file(name, [tokens], vocab_size=70_000, tokenizer_fingerprint=fingerprint)


@pytest.fixture
def make(tmp_path):
    return lambda name, *arguments: numbers(tmp_path / name, *arguments)


@pytest.mark.parametrize(
    ("weights", "steps", "words"),
    [
        ([1], 5, "10 rows, 1 epoch"),
        ([1], 1234, "10 rows, 247 epochs"),
        ([3, 1], 5, "20 rows of 2 sources, 0.25 to 0.75 epochs"),
    ],
)
def test_rows_and_epochs_are_said(weights, steps, words, tmp_path):
    files = [write_token_file(tmp_path / str(number), [range(81)]) for number in range(len(weights))]
    mixture = list(zip(files, weights, strict=True))
    assert GlobalBatches(mixture, 8, 2, seed=0).described(steps) == words


def test_samples_are_windows_and_labels_are_the_next_tokens(make):
    data = GlobalBatches(make("a", 50), 8, 6, seed=1)
    input_ids, labels, positions = batch_at(data, 0)
    assert positions is None
    assert data.samples == 6
    assert input_ids.shape == labels.shape == (6, 8)
    assert input_ids.dtype == labels.dtype == torch.int64
    assert input_ids.is_contiguous() and labels.is_contiguous()
    assert torch.equal(labels, input_ids + 1)
    assert sorted(input_ids[:, 0].tolist()) == [0, 8, 16, 24, 32, 40]
    assert (input_ids[:, 0] // 8).tolist() == ids_at(positions_of(0, 6, range(6)), 6, seed=1).tolist()


@pytest.mark.parametrize(("tokens", "samples"), [(9, 1), (16, 1), (17, 2), (24, 2), (25, 3)])
def test_a_window_shares_one_token_with_the_next(make, tokens, samples):
    assert GlobalBatches(make("a", tokens), 8, 1, seed=0).samples == samples


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Return a file, a mixture, and one of samples of chats and text, whose rows have positions."""
    folder = tmp_path_factory.mktemp("pieces")
    file, other = numbers(folder / "a", 100), numbers(folder / "b", 60, 100)
    samples = [range(10 * n, 11 * n) for n in range(1, 8)]
    learnt = [[1] * len(ids) for ids in samples]
    chat = write_token_file(folder / "chat", samples, learnt, vocab_size=70_000, tokenizer_fingerprint="t")
    return file, [(file, 2), (other, 1)], [(chat, 2), (other, 1)]


@settings(max_examples=drawn(40), deadline=None)
@given(step=st.integers(0, 10**9), seed=st.integers(0, 2**40))
def test_ranks_pieces_in_order_are_the_global_batch_D5(kinds, step, seed):
    for tokens in kinds:
        data = GlobalBatches(tokens, 7, 12, seed)
        whole = batch_at(data, step)
        assert (whole.positions is None) == (tokens is not kinds[2])
        for size in (1, 2, 3, 4, 6, 12):
            pieces = [batch_at(data, step, rank, size) for rank in range(size)]
            for of_ranks, tensor in zip(zip(*pieces, strict=True), whole, strict=True):
                assert tensor is None or torch.equal(torch.cat(of_ranks), tensor)


@settings(max_examples=drawn(40), deadline=None)
@given(
    kind=st.integers(0, 3), step=st.integers(0, 10**9), start=st.integers(0, 3), data_size=st.integers(1, 3),
    micro_batch=st.sampled_from([1, 2, 4]), pipeline=st.integers(1, 2), ahead=st.sampled_from([0, 1, 3]),
)  # fmt: skip
def test_a_step_reads_the_rows_of_its_first_micro_batch_and_then_of_the_next(
    kinds, kind, step, start, data_size, micro_batch, pipeline, ahead
):
    tokens, documents = (*kinds, kinds[0])[kind], "separate" if kind == 3 else "joined"
    data, read = GlobalBatches(tokens, 7, 24, 5, documents=documents), []
    for rows in data._rows:
        rows.fill = lambda *place, fill=rows.fill: (read.append(1), fill(*place))[1]
    for index in range(data_size):
        layout = Layout.of(data=data_size, pipeline=pipeline)
        state = SimpleNamespace(layout=layout, data_index=index, device=CPU)
        micro = MicroBatches(data, cast(Any, state), micro_batch=micro_batch, vocab_size=70_000)
        each = 24 // data_size if pipeline > 1 else micro_batch
        with micro.running(step + start, step + 5, ahead=ahead) as batches:
            for number in range(step + start, step + 5):
                before = len(read)
                batch = next(batches)
                made = [batch if isinstance(batch, Batch) else next(batch.parts)]
                if not ahead:
                    assert len(read) - before == each
                elif number == step + start:
                    assert len(read) - before <= each * (1 + ahead)
                whole = batch_at(data, number, index, data_size)
                if isinstance(batch, BatchParts):
                    made += batch.parts
                    assert batch.labels == (whole.labels != IGNORE).sum()
                    assert batch.rows == len(whole.input_ids)
                assert isinstance(batch, BatchParts) == (pipeline == 1)
                assert len(made) == len(whole.input_ids) // each
                for parts, tensor in zip(zip(*made, strict=True), whole, strict=True):
                    assert tensor is None or torch.equal(torch.cat(parts), tensor)
                del read[:]


def test_the_largest_batch_begins_as_fast_as_any(make):
    data, state = (
        GlobalBatches(make("a", 100), 8, MOST_ROWS, seed=0),
        SimpleNamespace(layout=Layout(), data_index=0, device=CPU),
    )
    asked, sample_ids = [], data.sample_ids
    data.sample_ids = lambda step, rows: (asked.append(len(rows)), sample_ids(step, rows))[1]
    batch = MicroBatches(data, cast(Any, state), micro_batch=2, vocab_size=70_000).batch(3)
    assert isinstance(batch, BatchParts) and batch.rows == MOST_ROWS and batch.labels == 8 * MOST_ROWS
    first = next(batch.parts)
    assert asked == [2], "rows whose places were computed"
    assert torch.equal(first.input_ids, data.rows(3, range(2)).input_ids) and len(first.labels) == 2


@pytest.mark.parametrize("named", [False, True])
def test_a_gpu_copies_batches_from_pinned_memory(named, make, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x + 1)  # which is seen in what it gives
    data = GlobalBatches(make("a", 100), 8, 2, seed=0)
    state = SimpleNamespace(layout=Layout(), data_index=0, device=torch.device("cuda"))
    micro = MicroBatches(data, cast(Any, state), micro_batch=2, vocab_size=70_000, named=named)
    batch = micro.batch(0)
    whole, pinned = data.rows(0, range(2)), batch if named else next(batch.parts)._asdict()
    for name, tensor in whole.samples().items():
        assert torch.equal(pinned[name], tensor + 1)


def test_a_mixture_gives_each_file_its_share_and_each_sample_once_an_epoch(make):
    files = [make("a", 8 * 40 + 1), make("b", 8 * 10 + 1, 1000), make("c", 8 * 30 + 1, 2000)]
    data = GlobalBatches(list(zip(files, [5, 3, 2], strict=True)), 8, 10, seed=0)
    assert data.samples == 80
    pairs = (zip(*data.sample_ids(step, range(10)), strict=True) for step in range(8))
    drawn = [(int(source), int(number)) for step in pairs for source, number in step]
    assert Counter(source for source, _ in drawn) == {0: 40, 1: 24, 2: 16}
    assert Counter(i for source, i in drawn if source == 0) == dict.fromkeys(range(40), 1)
    second = Counter(i for source, i in drawn if source == 1)
    assert set(second) == set(range(10)) and set(second.values()) == {2, 3}
    for step in range(8):
        starts = batch_at(data, step)[0][:, 0]
        expected = [1000 * source + 8 * sample for source, sample in drawn[10 * step : 10 * step + 10]]
        assert starts.tolist() == expected


def test_files_of_one_size_have_orders_of_their_own(make):
    files = [make("a", 8 * 50 + 1), make("b", 8 * 50 + 1)]
    data = GlobalBatches([(file, 1) for file in files], 8, 100, seed=0)
    sources, ids = data.sample_ids(0, range(100))
    assert (ids[sources == 0] != ids[sources == 1]).any()


def test_f12_fingerprints_name_files_and_shares(make):
    a, b = make("a", 100), make("b", 100, 7)
    prints = {
        GlobalBatches(tokens, 8, 1, seed=0).fingerprint
        for tokens in (a, b, [(a, 1), (b, 1)], [(b, 1), (a, 1)], [(a, 2), (b, 1)])
    }
    assert len(prints) == 5
    doubled, plain = (GlobalBatches([(a, w), (b, w)], 8, 1, seed=0) for w in (2, 1))
    assert doubled.fingerprint == plain.fingerprint


def test_f4_tokens_changed_after_the_file_was_opened_are_found_when_they_are_met(make):
    file = make("a", 60_000)  # four blocks, of which the first and the last are read when it is opened
    content = np.memmap(file.path.with_name("a.bin"), dtype="<u4", mode="r+")
    data = GlobalBatches(file, 60_000 - 1, 1, seed=0)
    content[20_000] = 69_999
    with pytest.raises(BadInput, match="bytes 65536 to 131071: expected the CRC-32"):
        batch_at(data, 0)


def numbered(step):
    return Batch(torch.tensor([[step]]), torch.tensor([[step + 1]]))


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_every_step_gets_its_batch(ahead):
    with prefetched(numbered, range(4, 20), ahead=ahead, device=CPU) as batches:
        assert [int(batch.input_ids) for batch in batches] == list(range(4, 20))
        assert bool(threads()) == bool(ahead)
    assert not threads()


def test_batches_are_made_while_the_caller_computes_and_no_further_than_asked():
    made = []

    def make(step):
        made.append(step)
        return numbered(step)

    with prefetched(make, range(100), ahead=3, device=CPU) as batches:
        next(batches)
        deadline = time.monotonic() + 30
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        assert made == [0, 1, 2, 3]


def test_an_error_reaches_the_loop_at_its_step_and_ends_the_thread():
    def make(step):
        if step == 2:
            raise BadInput("tokens", found="damage")
        return numbered(step)

    with prefetched(make, range(10), ahead=5, device=CPU) as batches:
        assert [int(next(batches).input_ids) for _ in range(2)] == [0, 1]
        with pytest.raises(BadInput, match="damage"):
            next(batches)
    assert not threads()


@pytest.fixture
def chat(tmp_path):
    """Write samples of 2 to 17 tokens, some of them to be learnt."""
    random = np.random.default_rng(1)
    with TokenWriter(tmp_path / "chat", vocab_size=131, template_sha256="t") as writer:
        for length in random.integers(2, 18, 60):
            writer.add_documents(random.integers(0, 131, length), [length], random.integers(0, 2, length))
        writer.commit()
    return tmp_path / "chat"


def test_a_packed_run_is_bitwise_the_same_without_prefetch_resumed_and_close_in_another_layout(
    tmp_path, chat
):
    text = write_tokens(tmp_path / "text", count=400)

    def go(name, prefetch, **more):
        data = {"tokens": [str(chat), str(text)], "documents": "separate", "prefetch": prefetch}
        train(tiny_recipe(tmp_path / name, chat, data=data, **more))

    go("plain", prefetch=0)
    go("ahead", prefetch=3)
    go("resumed", prefetch=3, stop_after=3)
    go("resumed", prefetch=1)
    whole = losses(tmp_path / "plain")
    assert len(whole) == 6 and len(set(whole)) == 6
    assert losses(tmp_path / "ahead") == losses(tmp_path / "resumed") == whole
    go("pairs", prefetch=2, layout={"data": 2, "zero": 1})
    np.testing.assert_allclose(losses(tmp_path / "pairs"), whole, rtol=1e-10)


def test_f12_a_run_does_not_go_on_with_rows_made_otherwise(tmp_path, chat):
    train(tiny_recipe(tmp_path / "run", chat, stop_after=2))
    text = write_tokens(tmp_path / "text", count=400)
    begun = {"tokens": [str(chat), str(text)], "overlong": "drop", "sequence_length": 8}
    train(tiny_recipe(tmp_path / "two", chat, data=begun, stop_after=2))
    for out, key, value, says in (
        ("run", "samples", "single", "expected packed, found single"),
        ("two", "documents", "separate", "expected joined, found separate"),
        ("two", "samples", "single", "expected packed, found single"),
        ("two", "overlong", "truncate", "expected drop, found truncate"),
        ("two", "weights", [1, 2], "expected [0-9/]+, [0-9/]+, found 1/3, 2/3"),
        ("two", "tokens", [str(text), str(chat)], "expected .*found .*, of .*text, .*chat"),
        ("two", "sequence_length", 12, "expected 8, found 12"),
    ):
        data = (begun if out == "two" else {}) | {key: value}
        with pytest.raises(RankError, match=rf"data\.{key}: {says}\. Resume"):
            train(tiny_recipe(tmp_path / out, chat, data=data))
