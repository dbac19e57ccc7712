"""What is wrong inside a token file: ``verify`` and training refuse it, or nothing changes."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.damage import flip_bit
from support.token_files import write_token_file
from trilith.cli.app import run
from trilith.data import TokenFile, token_index, token_sums
from trilith.data.batches import GlobalBatches
from trilith.data.token_index import TokenPaths
from trilith.data.token_writer import TokenWriter
from trilith.parallel_state import BadInput


def write(name, *, chat):
    """Some 40,000 tokens: three blocks with checksums and more bytes than the small probe of these tests."""
    rng = np.random.default_rng(3)
    ids, targets = rng.integers(0, 50_000, (800, 50)), rng.integers(0, 2, (800, 50))
    write_token_file(name, ids, targets if chat else None, vocab_size=50_000, eos_id=2)
    return name


def batches(name):
    """Everything that training reads of the file, in order: ids and labels of one epoch."""
    made = GlobalBatches(TokenFile.open(name), 64, 4, seed=0, overlong="truncate")
    steps = [made.batch(step) for step in range(made.samples // 4)]
    return np.stack([step.input_ids.numpy() for step in steps] + [step.labels.numpy() for step in steps])


@pytest.fixture(scope="module", params=[False, True], ids=["text", "chat"])
def whole(request, tmp_path_factory):
    """Return the name of a token file, what training reads of it, and its index."""
    name = write(tmp_path_factory.mktemp("whole") / "data", chat=request.param)
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
def test_a_flipped_bit_is_refused_or_changes_nothing(whole, data, monkeypatch):
    name, read_whole, index = whole
    path = data.draw(st.sampled_from([path for path in TokenPaths(name).all if path.exists()]))
    before = path.read_bytes()
    flip_bit(path, *divmod(data.draw(st.integers(0, 8 * len(before) - 1)), 8))
    try:
        with monkeypatch.context() as patch:
            # So that the probe, which reads all of a small file, does not do the work of the checksums.
            patch.setattr(token_index, "_check_content", size_alone)
            read = answer(lambda: batches(name))
            verified = answer(lambda: [TokenFile.open(name).verify()]) is not None
        if verified:  # a blank of the index that became another blank, say
            assert path.suffix == ".json" and TokenFile.open(name).index == index
        assert read is None or np.array_equal(read, read_whole)
    finally:
        path.write_bytes(before)


def size_alone(path, size, meaning, expected_probe):
    assert path.stat().st_size == size


def test_verify_sees_what_opening_does_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(token_index, "_PROBE_BYTES", 2)
    path = write_token_file(tmp_path / "data", [list(range(1000))], vocab_size=2000).path.with_suffix(".bin")
    flip_bit(path, 401)  # between two blocks of the probe: token 200 becomes 456
    file = TokenFile.open(path)
    with pytest.raises(BadInput, match="bytes 0 to 1999: expected the CRC-32"):
        file.verify()


def test_ids_beyond_the_stated_vocabulary_stop_the_batch_even_under_right_checksums(tmp_path, monkeypatch):
    with TokenWriter(tmp_path / "data", vocab_size=300) as writer:
        monkeypatch.setattr(writer, "_vocab_size", 60_000)
        writer.add([5] * 200 + [40_000] + [5] * 200)
        monkeypatch.setattr(writer, "_vocab_size", 300)
        writer.commit()
    made = GlobalBatches(TokenFile.open(tmp_path / "data"), 100, 4, seed=0)
    with pytest.raises(BadInput, match="token 200: expected below 300, found 40000"):
        made.batch(0)
    assert run(["verify", str(tmp_path / "data")]) == 2


def test_a_block_is_compared_once_however_often_it_is_read(tmp_path, monkeypatch):
    write(tmp_path / "data", chat=False)
    sums, crc32 = [], token_sums.crc32
    monkeypatch.setattr(token_sums, "crc32", lambda *arguments: sums.append(1) or crc32(*arguments))
    file = TokenFile.open(tmp_path / "data")
    for _ in range(3):
        for begin in range(0, 40_000, 1000):
            file.ids(begin, begin + 1000)
    assert len(sums) == 2  # 80,000 bytes


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("suffix", ["", ".bin", ".json"])
def test_verify_reads_a_token_file_and_says_what_it_compared(tmp_path, capsys, suffix, chat):
    name = write(tmp_path / "data", chat=chat)
    assert run(["verify", f"{name}{suffix}"]) == 0
    told = capsys.readouterr().out
    assert "40,000 ids below 50,000" in told and "800 documents" in told and "seal" in told
    flip_bit(name.with_suffix(".bin"), 70_000)
    assert run(["verify", f"{name}{suffix}"]) == 2
    assert "data.bin" in capsys.readouterr().err


def test_a_file_made_before_there_were_seals_is_still_read(tmp_path):
    name = write(tmp_path / "data", chat=False)
    index = TokenFile.open(name).index.model_dump(exclude_defaults=True, exclude={"sums_sha256", "seal"})
    name.with_suffix(".json").write_text(json.dumps(index | {"version": 1}))
    name.with_suffix(".sums").unlink()
    TokenFile.open(name).verify()
    name.with_suffix(".json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match="seal"):  # and no seal can be taken off a newer one
        TokenFile.open(name)
