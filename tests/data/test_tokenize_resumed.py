"""A tokenization that goes on after a stop writes its input as it is now, whatever happened in between."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import flip_bit
from support.token_files import bytes_of, stop_tokenizing, write_json_lines
from trilith.data import token_writer
from trilith.data.text.text_and_jsonl import read_blocks
from trilith.data.text.tokenize_files import tokenize
from trilith.data.text.tokenizer_training import train_tokenizer

WORDS = [f"number {i} of many words" for i in range(400)]


@pytest.fixture(scope="module", autouse=True)
def a_mark_for_each_of_many_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(token_writer, "MARK_EVERY", 0.0)
        patch.setitem(read_blocks.__kwdefaults__, "size", 1000)
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "folder"
    train_tokenizer(WORDS, folder, vocab_size=300)
    return folder


def write(path, letter):
    """Documents of the same sizes, whatever the letter."""
    write_json_lines(path, [{"text": letter + word} for word in WORDS])


def check_equal(path, tokenizer, out):
    """Going on gives the files that a call of its own gives."""
    tokenize([path], tokenizer, out, workers=1)
    tokenize([path], tokenizer, out.with_name("whole"), workers=1)
    assert len(bytes_of(out)) == 4 and bytes_of(out) == bytes_of(out.with_name("whole"))


@settings(max_examples=12, deadline=None)
@given(way=st.sampled_from(("in place", "renamed over", "not")), put_back=st.booleans(), at=st.integers(2, 9))
def test_an_input_that_changed_between_is_wholly_the_new_one(tokenizer, way, put_back, at):
    with tempfile.TemporaryDirectory() as name:
        path, out = Path(name) / "in.jsonl", Path(name) / "out"
        write(path, "a")
        before = path.stat()
        stop_tokenizing([path], tokenizer, out, at)
        if way != "not":
            fresh = path if way == "in place" else path.with_name("fresh")
            write(fresh, "b")
            fresh.rename(path)
        if put_back:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
        check_equal(path, tokenizer, out)


@settings(max_examples=25, deadline=None)
@given(file=st.floats(0, 1, exclude_max=True), bit=st.floats(0, 1, exclude_max=True))
def test_a_flipped_bit_in_what_a_stop_left_has_no_effect(tokenizer, file, bit):
    with tempfile.TemporaryDirectory() as name:
        path, out = Path(name) / "in.jsonl", Path(name) / "out"
        write(path, "a")
        stop_tokenizing([path], tokenizer, out, 8)
        files = [one for one in sorted(Path(name).glob("out.tmp-*/*")) if one.stat().st_size]
        assert {"journal", "lengths", "tokens"} <= {one.name for one in files}
        victim = files[int(file * len(files))]
        flip_bit(victim, *divmod(int(bit * victim.stat().st_size * 8), 8))
        check_equal(path, tokenizer, out)
