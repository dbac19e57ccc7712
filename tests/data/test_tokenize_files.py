"""Tokenizing: the same bytes from any number of workers and any cut of the input, after a stop too."""

import errno
import gzip
import json
import os
import re
import string
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.damage import flip_bit
from support.draws import drawn
from support.token_files import bytes_of, documents_of, stop_tokenizing, write_json_lines, zstd
from trilith.cli.app import run
from trilith.data import TokenFile, token_writer
from trilith.data.text import text_and_jsonl, tokenize_files
from trilith.data.text.text_and_jsonl import read_blocks
from trilith.data.text.tokenize_files import tokenize
from trilith.data.text.tokenizer_loading import load_tokenizer
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.parallel_state import BadInput, PeerFailed
from trilith.storage.staging import Staging

LIBRARY = Path(string.__file__).parent
SOURCES = [LIBRARY / f"{name}.py" for name in ("string", "textwrap", "token", "this")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t"
    train_tokenizer([source.read_text() for source in SOURCES], path, vocab_size=400)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def texts_of(file, tokenizer, *, eos=True):
    documents = documents_of(file)
    assert not eos or all(ids.pop() == tokenizer.eos_id for ids in documents)
    return [tokenizer.decode(ids) for ids in documents]


def jsonl(path, texts, *, key="text"):
    return write_json_lines(path, [{"n": i, key: text} for i, text in enumerate(texts)])


def test_a_text_file_is_a_document_ended_by_eos(folder, tokenizer, tmp_path):
    seen = []
    file = tokenize(
        SOURCES, folder, tmp_path / "out", workers=1, on_progress=lambda *figures: seen.append(figures)
    )
    assert texts_of(file, tokenizer) == [source.read_bytes().decode() for source in SOURCES]
    assert file.index.eos_id == 2 and file.vocab_size == 400
    assert file.index.tokenizer_fingerprint == tokenizer.fingerprint
    assert seen == sorted(seen)
    assert seen[-1] == (sum(source.stat().st_size for source in SOURCES), len(file.tokens))


def test_json_lines_in_order_blank_lines_and_empty_texts_left_out(folder, tokenizer, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a b\\nc"}\r\n\n{"text": ""}\n   \n{"text": "\\u00e9\xc3\xa9", "x": NaN}'
    )
    assert texts_of(tokenize([path], folder, tmp_path / "out", workers=1), tokenizer) == ["a b\nc", "éé"]


def test_paragraphs_are_documents(folder, tokenizer, tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbf\n\n  first\nstill first\n\n \t \nsecond\r\n\r\nthird\n\n\n")
    file = tokenize([path], folder, tmp_path / "out", split_paragraphs=True, workers=1)
    assert texts_of(file, tokenizer) == ["  first\nstill first", "second", "third"]


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.gz", "in.jsonl.zst", "in.parquet"])
def test_packed_files_give_the_same_tokens(folder, tmp_path, name):
    """Packed in two members or frames, as after ``cat``, or in groups of rows; a plain text too."""
    texts, packed = [f"row {i}" for i in range(3000)], tmp_path / name
    plain = SOURCES[0] if name == "in.gz" else jsonl(tmp_path / "in.jsonl", texts)
    if name == "in.parquet":
        table = pyarrow.table({"text": texts, "n": range(3000)})
        pyarrow.parquet.write_table(table, packed, row_group_size=700)
    else:
        compress, data = (gzip.compress if name.endswith("gz") else zstd), plain.read_bytes()
        packed.write_bytes(compress(data[:1000]) + compress(data[1000:]))
    for path, out in ((plain, "plain"), (packed, "packed")):
        tokenize([path], folder, tmp_path / out, workers=1)
    assert bytes_of(tmp_path / "plain") == bytes_of(tmp_path / "packed")


def test_a_disk_that_fails_is_not_taken_for_a_damaged_file(folder, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("text")
    monkeypatch.setattr(
        text_and_jsonl, "_cut", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    )
    with pytest.raises(OSError, match="Input/output error"):
        list(read_blocks(tmp_path / "in.txt", split_paragraphs=False, json_key="text"))


def test_the_bytes_do_not_depend_on_workers_or_block_size(folder, tmp_path, monkeypatch):
    model = folder / "tokenizer.model"
    parts = [part for source in SOURCES for part in source.read_text().split("\n\n")]
    inputs = [jsonl(tmp_path / "a.jsonl", parts), *SOURCES, jsonl(tmp_path / "b.jsonl", parts[::-1])]
    for name, workers, size in (("one", 1, 2**20), ("two", 1, 500), ("three", 3, 2000)):
        monkeypatch.setattr(read_blocks, "__kwdefaults__", {"size": size})
        tokenize(inputs, model, tmp_path / name, split_paragraphs=True, workers=workers)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two") == bytes_of(tmp_path / "three")


lines = st.lists(st.sampled_from(["", " ", "\t\r", "a", " b", "cc\r", "é", "\x0b"]), max_size=30)


@settings(max_examples=drawn(150), deadline=None)
@given(lines=lines, last=st.sampled_from(["", "\n"]), size=st.integers(1, 40))
def test_paragraphs_do_not_depend_on_where_blocks_are_cut(tmp_path_factory, lines, last, size):
    path = tmp_path_factory.mktemp("cut") / "in.txt"
    text = "\n".join(lines) + last
    path.write_bytes(text.encode())

    def documents(size):
        blocks = list(read_blocks(path, split_paragraphs=True, json_key="text", size=size))
        assert b"".join(bytes(block.data) for block in blocks) == text.encode()
        return [document for block in blocks for document in text_and_jsonl.documents_of(block, "text")]

    assert documents(size) == documents(10**6)
    expected = re.split(r"\n(?:[ \t\r]*\n)+", re.sub(r"\A(?:[ \t\r]*\n)+", "", text + "\n\n"))
    assert [document for _, document in documents(size)] == [p.removesuffix("\r") for p in expected if p]


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text(max_size=20), max_size=20), size=st.integers(1, 60))
def test_json_lines_do_not_depend_on_where_blocks_are_cut(tmp_path_factory, texts, size):
    path = jsonl(tmp_path_factory.mktemp("cut") / "in.jsonl", texts)
    blocks = read_blocks(path, split_paragraphs=False, json_key="text", size=size)
    found = [document for block in blocks for document in text_and_jsonl.documents_of(block, "text")]
    assert found == [(f"{path}:{i}", text) for i, text in enumerate(texts, 1) if text]


class KillsItsReader:
    """Stands for a job; whoever unpickles it dies as if for want of memory."""

    def __init__(self, tokenizer, json_key, append_eos, chat, bos_id):
        self.json_key, self.chat, self.bos_id = json_key, chat, bos_id

    def __reduce__(self):
        return (os._exit, (9,))


def test_of_several_bad_lines_any_number_of_workers_names_the_first(folder, tmp_path):
    path = tmp_path / "in.jsonl"
    good = b'{"text": "fine"}\n' * 100_000
    path.write_bytes(good + b"{\n" + good + b"[\n")
    for workers in (1, 2):
        with pytest.raises(BadInput, match=r"in\.jsonl:100001: "):
            tokenize([path], folder / "tokenizer.model", tmp_path / "out", workers=workers)
        assert sorted(tmp_path.iterdir()) == [path]


def test_a_worker_that_is_killed_ends_the_job(folder, tmp_path, monkeypatch):
    # Signals come from the worker itself, through what it unpickles: the code under test stays as it is.
    monkeypatch.setattr(tokenize_files, "Job", KillsItsReader)
    with pytest.raises(PeerFailed, match="--workers"):
        tokenize(SOURCES, folder / "tokenizer.model", tmp_path / "out", workers=2)
    assert list(tmp_path.iterdir()) == []


def test_a_document_has_a_largest_size(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(text_and_jsonl, "LARGEST_DOCUMENT", 1000)
    path = tmp_path / "in.txt"
    path.write_text("a\n" * 600)
    with pytest.raises(BadInput, match="--split-paragraphs"):
        tokenize([path], folder, tmp_path / "out", workers=1)


def test_no_eos_to_append(folder, tmp_path):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    copy = tmp_path / "t"
    copy.mkdir()
    (copy / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="--no-append-eos"):
        tokenize(SOURCES, copy, tmp_path / "out", workers=1)
    tokenize(SOURCES, copy, tmp_path / "out", workers=1, append_eos=False)


def test_a_worker_that_is_killed_while_it_starts_ends_the_job_too(folder, tmp_path, monkeypatch):
    """The server that starts workers then gives an end of file, which a command line takes for Ctrl-D."""

    def killed(*arguments):
        raise EOFError

    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor.submit", killed)
    with pytest.raises(PeerFailed, match="--workers"):
        tokenize(SOURCES, folder / "tokenizer.model", tmp_path / "out", workers=2)


@pytest.mark.parametrize(("name", "package"), [("in.txt.zst", "pyarrow"), ("in.parquet", "pyarrow")])
def test_a_package_that_is_not_there_is_named(folder, tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(BadInput, match=rf"{package}.*the extra data of trilith, or: pip install {package}"):
        tokenize([tmp_path / name], folder, tmp_path / "out", workers=1)


def test_the_command(folder, tokenizer, tmp_path, capsys):
    path = jsonl(tmp_path / "in.jsonl", ["one", "two"], key="body")
    words = ["tokenize", str(path), "--tokenizer", str(folder), "--out", str(tmp_path / "out")]
    assert run([*words, "--json-key", "body", "--workers", "1", "--no-append-eos"]) == 0
    assert "tokens in 2 documents" in capsys.readouterr().out
    assert texts_of(TokenFile.open(tmp_path / "out"), tokenizer, eos=False) == ["one", "two"]


def test_a_tokenizer_trained_by_the_command_is_the_functions(tmp_path, capsys):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    words = ["train-tokenizer", *map(str, SOURCES), "--vocab-size", "400", "--out", str(tmp_path / "t")]
    assert run([*words, "--chat-template", str(template)]) == 0
    assert "400 ids" in capsys.readouterr().out
    parts = [part for path in SOURCES for part in path.read_text().split("\n\n") if part.strip()]
    same = train_tokenizer(parts, tmp_path / "same", vocab_size=400)
    assert load_tokenizer(tmp_path / "t").fingerprint == same.fingerprint
    assert (tmp_path / "t" / "chat_template.jinja").read_text() == "{{ messages }}"


RESUMED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WORDS = [f"number {i} of many words" for i in range(400)]


@pytest.fixture
def a_mark_for_each_of_many_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(token_writer, "MARK_EVERY", 0.0)
        patch.setitem(read_blocks.__kwdefaults__, "size", 1000)
        yield


def write_words(path, letter):
    """Documents of the same sizes, whatever the letter."""
    write_json_lines(path, [{"text": letter + word} for word in WORDS])


def check_equal(path, folder, out):
    """Going on gives the files that a call of its own gives."""
    tokenize([path], folder, out, workers=1)
    tokenize([path], folder, out.with_name("whole"), workers=1)
    assert len(bytes_of(out)) == 4 and bytes_of(out) == bytes_of(out.with_name("whole"))


@pytest.mark.usefixtures("a_mark_for_each_of_many_blocks")
def test_a_job_that_was_killed_when_all_was_written_goes_on(folder, tmp_path, monkeypatch):
    """Between the last file and the first name, in a folder that the next start takes up."""
    write_words(tmp_path / "in.jsonl", "a")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Staging, "publish_files", mock.Mock(side_effect=KeyboardInterrupt))
        tokenize([tmp_path / "in.jsonl"], folder, tmp_path / "out", workers=1)
    assert [path.name for path in tmp_path.glob("out.tmp-*/index")]
    check_equal(tmp_path / "in.jsonl", folder, tmp_path / "out")


@pytest.mark.usefixtures("a_mark_for_each_of_many_blocks")
@settings(RESUMED, max_examples=drawn(20))
@given(way=st.sampled_from(("in place", "renamed over", "not")), put_back=st.booleans(), at=st.integers(2, 9))
def test_an_input_that_changed_between_is_wholly_the_new_one(folder, way, put_back, at):
    with tempfile.TemporaryDirectory() as name:
        path, out = Path(name) / "in.jsonl", Path(name) / "out"
        write_words(path, "a")
        before = path.stat()
        stop_tokenizing([path], folder, out, at)
        if way != "not":
            fresh = path if way == "in place" else path.with_name("fresh")
            write_words(fresh, "b")
            fresh.rename(path)
        if put_back:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
        check_equal(path, folder, out)


@pytest.mark.usefixtures("a_mark_for_each_of_many_blocks")
@settings(RESUMED, max_examples=drawn(40))
@given(file=st.floats(0, 1, exclude_max=True), bit=st.floats(0, 1, exclude_max=True))
def test_a_flipped_bit_in_what_a_stop_left_has_no_effect(folder, file, bit):
    with tempfile.TemporaryDirectory() as name:
        path, out = Path(name) / "in.jsonl", Path(name) / "out"
        write_words(path, "a")
        stop_tokenizing([path], folder, out, 8)
        files = [one for one in sorted(Path(name).glob("out.tmp-*/*")) if one.stat().st_size]
        assert {"journal", "lengths", "tokens"} <= {one.name for one in files}
        victim = files[int(file * len(files))]
        flip_bit(victim, *divmod(int(bit * victim.stat().st_size * 8), 8))
        check_equal(path, folder, out)
