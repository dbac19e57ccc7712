"""Token files: what is written is read back, and whatever does not fit together is refused."""

import contextlib
import errno
import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from trilith.data import TokenFile, token_index
from trilith.data.token_index import TokenIndex
from trilith.data.token_writer import TokenWriter
from trilith.data.vocabulary import check_vocabulary
from trilith.parallel_state import BadInput
from trilith.storage.disk import Disk, DiskFailed
from trilith.storage.lock import FileLock

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


def write(name, documents=DOCUMENTS, vocab_size=300):
    with TokenWriter(name, vocab_size=vocab_size, eos_id=2, tokenizer_fingerprint="abc") as writer:
        for ids in documents:
            writer.add(ids)
        return writer.commit()


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def change_index(name, **changes):
    """Change the index as somebody would who also knows the seal."""
    path = name.with_name(name.name + ".json")
    content = {**json.loads(path.read_text()), **changes}
    with contextlib.suppress(ValueError):
        content["seal"] = TokenIndex.model_validate(content).sealed().seal
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(300, "<u2"), (2**16, "<u2"), (2**16 + 1, "<u4"), (128_256, "<u4")]
)
def test_what_is_written_is_read_back(tmp_path, vocab_size, dtype):
    documents = [*DOCUMENTS, [vocab_size - 1]]
    write(tmp_path / "data", documents, vocab_size)
    file = TokenFile.open(tmp_path / "data")
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.dtype == np.dtype(dtype)
    assert [
        file.tokens[a:b].tolist() for a, b in zip(file.documents, file.documents[1:], strict=False)
    ] == documents
    assert (tmp_path / "data.bin").read_bytes() == np.concatenate(documents).astype(dtype).tobytes()
    assert (
        file.index.eos_id == 2 and file.index.tokenizer_fingerprint == "abc" and file.vocab_size == vocab_size
    )
    assert files(tmp_path) == ["data.bin", "data.docs.npy", "data.json", "data.sums"]
    file.verify()


@pytest.mark.parametrize("suffix", ["", ".bin", ".json", ".docs.npy", ".sums"])
def test_any_of_the_files_names_it(tmp_path, suffix):
    write(tmp_path / "v1.5")
    assert TokenFile.open(tmp_path / f"v1.5{suffix}").index.tokens == 9


def test_a_name_with_blanks_and_umlauts(tmp_path):
    write(tmp_path / "größer als das")
    assert TokenFile.open(tmp_path / "größer als das").index.documents == 3


def test_chunks_and_single_documents_make_the_same_file(tmp_path):
    write(tmp_path / "one")
    with TokenWriter(tmp_path / "two", vocab_size=300, eos_id=2, tokenizer_fingerprint="abc") as writer:
        writer.add_documents(np.array([1, 2, 3, 4]), np.array([3, 1]))
        writer.add_documents(np.array([], dtype=np.uint16), np.array([], dtype=np.int64))
        writer.add_documents(np.array([5, 6, 7, 8, 9]), np.array([5]))
        writer.commit()
    for suffix in (".bin", ".docs.npy", ".sums", ".json"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([300], id="F4-id-not-below-vocabulary"),
        pytest.param([5, -1, 6], id="F5-negative-id"),
        pytest.param([2**16 + 1], id="F5-id-that-would-wrap-in-uint16"),
        pytest.param([1.5], id="not-whole"),
    ],
)
def test_bad_ids_are_not_written_and_nothing_stays(tmp_path, ids):
    with (
        pytest.raises(BadInput),
        TokenWriter(tmp_path / "data", vocab_size=300) as writer,
    ):
        writer.add([1])
        writer.add(ids)
    assert files(tmp_path) == []


def test_no_token_at_all_is_refused(tmp_path):
    with pytest.raises(BadInput, match="at least one"), TokenWriter(tmp_path / "d", vocab_size=300) as writer:
        writer.commit()
    assert files(tmp_path) == []


def _cut_half(name):
    path = name.with_name(name.name + ".bin")
    path.write_bytes(path.read_bytes()[:-1])


def _empty(suffix):
    return lambda name: name.with_name(name.name + suffix).write_bytes(b"") and None


def _remove(suffix):
    return lambda name: name.with_name(name.name + suffix).unlink()


def _pipe(suffix):
    def make(name):
        path = name.with_name(name.name + suffix)
        path.unlink()
        os.mkfifo(path)

    return make


def _index(text):
    data = text.encode() if isinstance(text, str) else text
    return lambda name: name.with_name(name.name + ".json").write_bytes(data) and None


def _changed(**changes):
    return lambda name: change_index(name, **changes)


def _documents(offsets, *, rehash=True):
    def make(name):
        path = name.with_name(name.name + ".docs.npy")
        np.save(path, np.asarray(offsets), allow_pickle=True)
        if rehash:
            import hashlib

            change_index(name, documents_sha256=hashlib.sha256(path.read_bytes()).hexdigest())

    return make


def _file_of_another(suffix):
    def make(name):
        other = name.with_name("other")
        write(other, [[1, 2], [4, 4], [5, 6, 7, 8, 1]])
        other.with_name("other" + suffix).rename(name.with_name(name.name + suffix))

    return make


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(_empty(".bin"), "empty", id="F1-empty-tokens"),
        pytest.param(_empty(".json"), "empty", id="F1-empty-index"),
        pytest.param(_empty(".docs.npy"), "empty", id="F1-empty-offsets"),
        pytest.param(_changed(vocab_size=128_256), "uint32", id="F5-uint16-for-a-vocabulary-of-128256"),
        pytest.param(_changed(dtype="uint32"), "36 bytes", id="F5-wrong-width"),
        pytest.param(_changed(dtype="int16"), "dtype", id="F5-signed-type"),
        pytest.param(_cut_half, "18 bytes", id="F6-odd-byte-length"),
        pytest.param(_file_of_another(".bin"), "others", id="F7-tokens-of-another"),
        pytest.param(_file_of_another(".json"), "others", id="F7-index-of-another"),
        pytest.param(_file_of_another(".docs.npy"), "sha256", id="F7-offsets-of-another"),
        pytest.param(_documents([0, 4, 3, 9]), "offset 2", id="F11-offsets-fall"),
        pytest.param(_documents([0, 3, 3, 9]), "offset 2", id="F11-empty-document"),
        pytest.param(_documents([1, 3, 4, 9]), "0 to 9", id="F11-does-not-start-at-0"),
        pytest.param(_documents([0, 3, 4, 10]), "0 to 9", id="F11-past-the-end"),
        pytest.param(_documents([0, 3, 9]), "shape", id="F11-too-few"),
        pytest.param(_documents([0.0, 3, 4, 9]), "int64", id="F11-floats"),
        pytest.param(_documents(np.array([0, 3, 4, None])), "int64", id="F11-pickle-is-never-loaded"),
        pytest.param(_documents([0, 2, 4, 9], rehash=False), "sha256", id="F11-changed-by-hand"),
        pytest.param(_documents(np.zeros(4000)), "bytes", id="F11-far-too-long"),
        pytest.param(_remove(".json"), "trilith tokenize", id="no-index"),
        pytest.param(_remove(".bin"), "nothing there", id="no-tokens"),
        pytest.param(_remove(".docs.npy"), "nothing there", id="no-offsets"),
        pytest.param(_pipe(".bin"), "regular file", id="pipe-for-tokens"),
        pytest.param(_pipe(".json"), "regular file", id="pipe-for-index"),
        pytest.param(_index("{"), "JSON", id="index-not-json"),
        pytest.param(_index(b"\xff\xfe"), "UTF-8", id="index-not-utf-8"),
        pytest.param(_index("[" * 200_000), "depth", id="index-nested-too-deep"),
        pytest.param(_index("[]"), "expected", id="index-not-an-object"),
        pytest.param(_index(b" " * (2**20 + 1)), "1,048,576 bytes", id="index-too-long"),
        pytest.param(_changed(version=99), "version", id="index-of-a-later-version"),
        pytest.param(_changed(tokens="9"), "tokens", id="index-number-as-text"),
        pytest.param(_changed(tokens=0), "tokens", id="index-no-tokens"),
        pytest.param(_changed(tokens=10), "20 bytes", id="index-one-token-more"),
        pytest.param(_changed(surprise=1), "surprise", id="index-unknown-key"),
    ],
)
def test_damage_is_refused(tmp_path, damage, message):
    write(tmp_path / "data")
    damage(tmp_path / "data")
    with pytest.raises(BadInput) as caught:
        TokenFile.open(tmp_path / "data")
    assert message in str(caught.value) and "\n" not in str(caught.value)


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_f11_a_pickle_among_the_offsets_is_not_run(tmp_path):
    write(tmp_path / "data")
    _documents(np.array([0, 3, 4, _Evil(tmp_path / "ran")]))(tmp_path / "data")
    with pytest.raises(BadInput):
        TokenFile.open(tmp_path / "data")
    assert not (tmp_path / "ran").exists()


def test_verify_sees_what_opening_does_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(token_index, "_PROBE_BYTES", 2)
    write(tmp_path / "data", [list(range(1000))], 2000)
    path = tmp_path / "data.bin"
    content = bytearray(path.read_bytes())
    content[401] = 3  # between two blocks of the probe: token 200 becomes 968
    path.write_bytes(content)
    file = TokenFile.open(path)
    with pytest.raises(BadInput, match="bytes 0 to 1999: expected the CRC-32"):
        file.verify()


def test_verify_names_an_id_outside_the_vocabulary(tmp_path):
    write(tmp_path / "data")
    change_index(tmp_path / "data", vocab_size=8)
    with pytest.raises(BadInput, match="token 7"):
        TokenFile.open(tmp_path / "data").verify()


def test_f12_fingerprint_is_of_the_content_alone(tmp_path):
    first, again = write(tmp_path / "a"), write(tmp_path / "b")
    other = write(tmp_path / "c", [*DOCUMENTS[:2], [5, 6, 7, 8, 10]])
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_f8_vocabulary_may_be_smaller_than_the_models_but_not_larger(tmp_path):
    file = write(tmp_path / "data")
    check_vocabulary(file.vocab_size, 300, file.path)
    check_vocabulary(file.vocab_size, 512, file.path)
    with pytest.raises(BadInput, match="at most 299"):
        check_vocabulary(file.vocab_size, 299, file.path)


def test_f13_a_second_writer_of_the_name_is_refused_while_one_writes_and_after(tmp_path):
    with TokenWriter(tmp_path / "data", vocab_size=300) as first:
        first.add([1, 2])
        with (
            pytest.raises(BadInput, match="another process"),
            TokenWriter(tmp_path / "data", vocab_size=300),
        ):
            raise AssertionError("two writers at once")
        first.add([3])
        first.commit()
    with pytest.raises(BadInput, match="an existing file"), TokenWriter(tmp_path / "data", vocab_size=300):
        raise AssertionError("written over")
    assert TokenFile.open(tmp_path / "data").tokens.tolist() == [1, 2, 3]
    assert files(tmp_path) == ["data.bin", "data.docs.npy", "data.json", "data.sums"]


def _race(name, mine, start, answers):
    start.wait()
    try:
        with TokenWriter(name, vocab_size=300) as writer:
            for _ in range(200):
                writer.add([mine] * 50)
            writer.commit()
        answers.put(mine)
    except BadInput:
        answers.put(None)


def test_f13_a_writer_that_finishes_just_before_the_lock_is_not_written_over(tmp_path, monkeypatch):
    take = FileLock.take

    def late(path):
        monkeypatch.setattr(FileLock, "take", take)
        write(tmp_path / "data", [[7]])
        return take(path)

    monkeypatch.setattr(FileLock, "take", late)
    with pytest.raises(BadInput, match="an existing file"):
        write(tmp_path / "data")
    assert TokenFile.open(tmp_path / "data").tokens.tolist() == [7]


def test_f13_of_processes_that_race_exactly_one_writes(tmp_path):
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        start, answers = context.Barrier(4), context.Queue()
        name = tmp_path / f"data{attempt}"
        racers = [context.Process(target=_race, args=(name, i, start, answers)) for i in range(4)]
        for racer in racers:
            racer.start()
        won = [answer for answer in (answers.get(timeout=60) for _ in racers) if answer is not None]
        for racer in racers:
            racer.join()
        assert len(won) == 1
        assert set(TokenFile.open(name).tokens.tolist()) == set(won)
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]


def _die(name, after):
    renames = 0

    def rename(self, old, new):
        nonlocal renames
        if f"{renames} renames" == after:
            os._exit(9)
        renames += 1
        os.rename(old, new)

    pytest.MonkeyPatch().setattr(Disk, "rename", rename)  # never undone: this process ends here
    with TokenWriter(name, vocab_size=300) as writer:
        writer.add([1, 2, 3])
        if after == "some tokens":
            os._exit(9)
        writer.commit()


@pytest.mark.parametrize("after", ["some tokens", "0 renames", "1 renames", "2 renames", "3 renames"])
def test_a_killed_writer_leaves_no_token_file_and_does_not_stand_in_the_way(tmp_path, after):
    process = multiprocessing.get_context("fork").Process(target=_die, args=(tmp_path / "data", after))
    process.start()
    process.join()
    assert process.exitcode == 9
    with pytest.raises(BadInput):
        TokenFile.open(tmp_path / "data")
    write(tmp_path / "data")
    assert TokenFile.open(tmp_path / "data").tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert files(tmp_path) == ["data.bin", "data.docs.npy", "data.json", "data.sums"]


@pytest.mark.parametrize("failing", range(4))
def test_a_disk_that_refuses_a_name_leaves_nothing(tmp_path, monkeypatch, failing):
    done = []

    def rename(self, old, new):
        if len(done) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done.append(new)
        os.rename(old, new)

    with monkeypatch.context() as patch, pytest.raises(DiskFailed, match="cannot be written"):
        patch.setattr(Disk, "rename", rename)
        write(tmp_path / "data")
    assert len(done) == failing and files(tmp_path) == []
    write(tmp_path / "data")


@pytest.mark.parametrize("suffix", [".bin", ".docs.npy", ".sums", ".json"])
def test_a_strangers_file_is_never_written_over(tmp_path, suffix):
    (tmp_path / f"data{suffix}").write_bytes(b"precious")
    with pytest.raises(BadInput, match="an existing file"):
        write(tmp_path / "data")
    assert (tmp_path / f"data{suffix}").read_bytes() == b"precious"
    assert files(tmp_path) == [f"data{suffix}"]


def test_a_strangers_files_beside_it_stay_whatever_they_are_called(tmp_path):
    precious = [tmp_path / name for name in ("data.lock", "data.tmp-lock", "data.partial", "data.tmp-mine")]
    for path in precious:
        path.write_text("precious")
    (tmp_path / "empty.lock").touch()
    write(tmp_path / "data")
    write(tmp_path / "empty")
    assert [path.read_text() for path in precious] == ["precious"] * 4
    assert (tmp_path / "empty.lock").exists()


def test_a_new_folder_is_made_and_goes_again_on_failure(tmp_path):
    with pytest.raises(BadInput), TokenWriter(tmp_path / "new" / "data", vocab_size=10) as writer:
        writer.add([11])
    assert files(tmp_path) == []
    write(tmp_path / "new" / "data")
    assert files(tmp_path / "new") == ["data.bin", "data.docs.npy", "data.json", "data.sums"]
    with pytest.raises(BadInput, match="a folder"):
        write(tmp_path / "a" / "b" / "data")


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
        "sync tokens", "sync documents", "sync sums", "sync index",
        "rename tokens", "rename documents", "rename sums", folder, "rename index", folder,
    ]  # fmt: skip
