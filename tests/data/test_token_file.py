"""Token files are written whole by one writer and read back; what is wrong inside is refused or no matter."""

import errno
import hashlib
import json
import multiprocessing
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.damage import flip_bit
from support.token_files import batch_at, bytes_of, documents_of, write_token_file
from trilith.cli.app import run
from trilith.data import TokenFile, token_sums
from trilith.data.batches import GlobalBatches
from trilith.data.token_index import TokenPaths
from trilith.data.token_writer import TokenWriter
from trilith.parallel_state import BadInput
from trilith.storage.disk import Disk, DiskFailed, FileLock

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
WRITTEN = ["data.bin", "data.docs.npy", "data.json", "data.sums"]
write = partial(write_token_file, documents=DOCUMENTS, vocab_size=300, eos_id=2, tokenizer_fingerprint="abc")


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(300, "<u2"), (2**16, "<u2"), (2**16 + 1, "<u4"), (128_256, "<u4")]
)
def test_written_documents_are_read_back(tmp_path, vocab_size, dtype):
    name, documents = tmp_path / "new" / "data", [*DOCUMENTS, [vocab_size - 1]]
    write(name, documents=documents, vocab_size=vocab_size)
    file = TokenFile.open(name)
    assert isinstance(file.tokens, np.memmap) and file.tokens.dtype == np.dtype(dtype)
    assert documents_of(file) == documents
    assert name.with_suffix(".bin").read_bytes() == np.concatenate(documents).astype(dtype).tobytes()
    assert (file.index.eos_id, file.index.tokenizer_fingerprint, file.vocab_size) == (2, "abc", vocab_size)
    assert files(name.parent) == WRITTEN
    file.verify()


@pytest.mark.parametrize("name", ["v1.5", "größer als das"])
@pytest.mark.parametrize("suffix", ["", ".bin", ".json", ".docs.npy", ".sums"])
def test_any_of_its_files_names_a_token_file(tmp_path, name, suffix):
    write(tmp_path / name)
    assert TokenFile.open(tmp_path / f"{name}{suffix}").index.tokens == 9


def test_chunks_and_single_documents_make_the_same_file(tmp_path):
    write(tmp_path / "one")
    with TokenWriter(tmp_path / "two", vocab_size=300, eos_id=2, tokenizer_fingerprint="abc") as writer:
        writer.add_documents(np.array([1, 2, 3, 4]), np.array([3, 1]))
        writer.add_documents(np.array([], dtype=np.uint16), np.array([], dtype=np.int64))
        writer.add_documents(np.array([5, 6, 7, 8, 9]), np.array([5]))
        writer.commit()
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_f12_fingerprint_is_of_the_content_alone(tmp_path):
    first, again = write(tmp_path / "a"), write(tmp_path / "b")
    other = write(tmp_path / "c", documents=[*DOCUMENTS[:2], [5, 6, 7, 8, 10]])
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_f13_a_writer_that_finishes_just_before_the_lock_is_not_written_over(tmp_path, monkeypatch):
    take = FileLock.take

    def late(path):
        monkeypatch.setattr(FileLock, "take", take)
        write(tmp_path / "data", documents=[[7]])
        return take(path)

    monkeypatch.setattr(FileLock, "take", late)
    with pytest.raises(BadInput, match="an existing file"):
        write(tmp_path / "data")
    assert TokenFile.open(tmp_path / "data").tokens.tolist() == [7]


def renames(count, then):
    """Return a rename that gives so many names, and then does something else."""
    left = iter(range(count))

    def rename(self, old, new):
        if next(left, None) is None:
            then()
        os.rename(old, new)

    return rename


def write_and_die(name, after):
    die = partial(os._exit, 9)
    pytest.MonkeyPatch().setattr(Disk, "rename", renames(after or 0, die))  # never undone: this process ends
    with TokenWriter(name, vocab_size=300) as writer:
        writer.add([1, 2, 3])
        if after is None:
            die()
        writer.commit()


@pytest.mark.parametrize("after", [None, *range(4)], ids=["some tokens", *(f"{n} renames" for n in range(4))])
def test_a_killed_writer_leaves_no_token_file_and_blocks_no_later_one(tmp_path, after):
    process = multiprocessing.get_context("fork").Process(
        target=write_and_die, args=(tmp_path / "data", after)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    with pytest.raises(BadInput):
        TokenFile.open(tmp_path / "data")
    write(tmp_path / "data")
    assert TokenFile.open(tmp_path / "data").tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert files(tmp_path) == WRITTEN


@pytest.mark.parametrize("failing", range(4))
def test_a_disk_that_refuses_a_name_leaves_nothing(tmp_path, failing):
    def refuse():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    refusal = pytest.raises(DiskFailed, match="cannot be written")
    with mock.patch.object(Disk, "rename", renames(failing, refuse)), refusal:
        write(tmp_path / "data")
    with mock.patch.object(TokenWriter, "_open", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        write(tmp_path / "data")
    assert files(tmp_path) == []
    write(tmp_path / "data")


def test_everything_is_on_disk_before_the_index_appears(tmp_path, monkeypatch):
    """Power loss cannot be tested by a kill: the order of syncs and renames is held instead."""
    log = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        log.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def rename(old, new):
        log.append(f"rename {old.name}")
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    write(tmp_path / "data")
    folder = f"sync {tmp_path.name}"
    assert log == [
        "sync tokens", "sync lengths", "sync documents", "sync sums", "sync index",
        "rename tokens", "rename documents", "rename sums", folder, "rename index", folder,
    ]  # fmt: skip


def write_much(name, *, chat):
    """Some 40,000 tokens: two blocks with checksums."""
    rng = np.random.default_rng(3)
    ids, targets = rng.integers(0, 50_000, (800, 50)), rng.integers(0, 2, (800, 50))
    write_token_file(name, ids, targets if chat else None, vocab_size=50_000, eos_id=2)
    return name


def batches(name):
    """Everything that training reads of the file, in order: ids and labels of one epoch."""
    made = GlobalBatches(TokenFile.open(name), 64, 4, seed=0, overlong="truncate")
    steps = [batch_at(made, step) for step in range(made.samples // 4)]
    return np.stack([step.input_ids.numpy() for step in steps] + [step.labels.numpy() for step in steps])


@pytest.fixture(scope="module", params=[False, True], ids=["text", "chat"])
def whole(request, tmp_path_factory):
    """Return the name of a token file, what training reads of it, and its index."""
    name = write_much(tmp_path_factory.mktemp("whole") / "data", chat=request.param)
    return name, batches(name), TokenFile.open(name).index


def answer(read):
    try:
        return read()
    except BadInput:
        return None


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_changes_nothing(whole, data):
    name, read_whole, index = whole
    path = data.draw(st.sampled_from([path for path in TokenPaths.named(name).all if path.exists()]))
    before = path.read_bytes()
    flip_bit(path, *divmod(data.draw(st.integers(0, 8 * len(before) - 1)), 8))
    try:
        read = answer(lambda: batches(name))
        verified = answer(lambda: [TokenFile.open(name).verify()]) is not None
        if verified:  # a blank of the index that became another blank, say
            assert path.suffix == ".json" and TokenFile.open(name).index == index
        assert read is None or np.array_equal(read, read_whole)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("at", "opens"), [(0, False), (2 * 65_536 + 5, True), (3 * 65_536 - 1, True), (-1, False)]
)
def test_opening_reads_the_first_and_the_last_block_and_verify_all(tmp_path, at, opens):
    documents = [np.arange(1000)] * 150
    path = write_token_file(tmp_path / "data", documents, vocab_size=2000).path.with_suffix(".bin")
    flip_bit(path, at % path.stat().st_size)
    read = TokenFile.open(path).verify if opens else partial(TokenFile.open, path)
    with pytest.raises(BadInput, match=r"bytes .*: expected the CRC-32"):
        read()


def test_ids_beyond_the_stated_vocabulary_stop_the_batch_even_under_right_checksums(tmp_path, monkeypatch):
    with TokenWriter(tmp_path / "data", vocab_size=300) as writer:
        monkeypatch.setattr(writer, "_vocab_size", 60_000)
        writer.add([5] * 200 + [40_000] + [5] * 200)
        monkeypatch.setattr(writer, "_vocab_size", 300)
        writer.commit()
    made = GlobalBatches(TokenFile.open(tmp_path / "data"), 100, 4, seed=0)
    with pytest.raises(BadInput, match="token 200: expected below 300, found 40000"):
        batch_at(made, 0)
    assert run(["verify", str(tmp_path / "data")]) == 2


def test_a_block_is_compared_once_however_often_it_is_read(tmp_path, monkeypatch):
    write_much(tmp_path / "data", chat=False)
    sums, crc32 = [], token_sums.crc32
    monkeypatch.setattr(token_sums, "crc32", lambda *arguments: sums.append(1) or crc32(*arguments))
    file = TokenFile.open(tmp_path / "data")
    for _ in range(3):
        for begin in range(0, 40_000, 1000):
            file.ids(begin, begin + 1000)
    assert len(sums) == 2  # 80,000 bytes


@pytest.mark.parametrize("chat", [False, True])
def test_verify_reads_a_token_file_and_says_what_it_compared(tmp_path, capsys, chat):
    name = write_much(tmp_path / "data", chat=chat)
    assert run(["verify", f"{name}.bin"]) == 0
    told = capsys.readouterr().out
    assert "40,000 ids below 50,000" in told and "800 documents" in told and "seal" in told
    digests = dict(line.split("  ")[::-1] for line in told.splitlines()[:-1])
    assert digests.keys() == {"data.bin", "data.docs.npy", *(["data.targets"] if chat else [])}
    for file, digest in digests.items():
        assert hashlib.sha256((tmp_path / file).read_bytes()).hexdigest() == digest
    flip_bit(name.with_suffix(".bin"), 70_000)
    assert run(["verify", str(name)]) == 2
    assert "data.bin" in capsys.readouterr().err


def test_an_index_with_the_hash_of_samples_that_was_once_written_is_read(tmp_path):
    name = write_much(tmp_path / "data", chat=True)
    index = TokenFile.open(name).index
    targets = index.targets.model_copy(update={"probe": "1" * 64})
    index = index.model_copy(update={"probe": "0" * 64, "targets": targets}).sealed()
    name.with_suffix(".json").write_text(json.dumps(index.model_dump(exclude_defaults=True)))
    TokenFile.open(name).verify()
