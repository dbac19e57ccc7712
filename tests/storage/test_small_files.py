"""One reader for small files: a regular file, a limit, UTF-8, one meaning; anything else is one line."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trilith.parallel_state import BadInput, MachineFailed
from trilith.storage.small_files import read_good_lines, read_json, read_json_lines, read_text, read_toml

Reader = Callable[[Path], Any]
READERS = [read_text, read_json, read_toml, lambda path: list(read_json_lines(path))]


def _pipe(path):
    os.mkfifo(path)


def _loop(path):
    path.symlink_to(path)


def _sparse(path):
    with path.open("wb") as file:
        file.truncate(10 << 30)


NOT_FILES = [
    ("missing", lambda path: None, "nothing there"),
    ("broken link", lambda path: path.symlink_to("nowhere"), "a link to nowhere, which is absent"),
    ("link loop", _loop, "symbolic links"),
    ("pipe", _pipe, "a pipe"),
    ("device without end", lambda path: path.symlink_to("/dev/zero"), "a device"),
    ("empty device", lambda path: path.symlink_to("/dev/null"), "a device"),
    ("folder", lambda path: path.mkdir(), "a directory"),
    ("10 GB", _sparse, "bytes"),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(("make", "says"), [pytest.param(m, says, id=name) for name, m, says in NOT_FILES])
def test_what_is_no_small_file_is_refused_in_one_line(tmp_path, read, make, says):
    make(tmp_path / "a")
    with pytest.raises(BadInput, match=says) as caught:
        read(tmp_path / "a")
    assert str(tmp_path / "a") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("read", READERS[:3])
def test_bytes_that_are_no_text_are_refused(tmp_path, read):
    (tmp_path / "a").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="a: expected UTF-8 text, found byte 0xff at 0"):
        read(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(BadInput, match="git lfs pull"):
        read(tmp_path / "a")


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"a": ' + "[" * 101 + "]" * 101 + "}",
        '{"a": ' * 101 + "1" + "}" * 101,
        "[" * 100_000,
        "[1]",
        "",
        '{"a": 1} {"b": 2}',
        '{"a": ' + "9" * 5000 + "}",
    ],
)
def test_json_with_no_one_meaning_is_refused(tmp_path, text):
    (tmp_path / "a").write_text(text)
    with pytest.raises(BadInput) as caught:
        read_json(tmp_path / "a")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text",
    ["a = nan", "a = -inf", "a = 1e999", "a = 1\na = 2", "a = [", "a = " + "[" * 5000, "a = " + "9" * 5000],
)
def test_toml_with_no_one_meaning_is_refused(tmp_path, text):
    (tmp_path / "a").write_text(text)
    with pytest.raises(BadInput) as caught:
        read_toml(tmp_path / "a")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_byte_order_mark_is_left_out(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert read_toml(tmp_path / "a") == {"a": 1}


def test_a_machine_with_too_few_descriptors_is_no_bad_input(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("{}")

    def none_left(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", none_left)
    with pytest.raises(MachineFailed, match=r"a: Too many open files\. Raise the limit \(ulimit -n"):
        read_json(tmp_path / "a")


NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
NESTED = st.recursive(
    st.none() | st.booleans() | NUMBER | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.lists(st.dictionaries(st.text(max_size=3), NESTED, max_size=2), max_size=6), st.data())
def test_good_lines_stay_whatever_stands_between_them(tmp_path_factory, lines, data):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    raw = []
    for line in lines:
        raw.append(json.dumps(line).encode())
        raw.append(data.draw(st.binary(max_size=9).map(lambda noise: b"\xff" + noise.replace(b"\n", b""))))
    path.write_bytes(b"\n".join(raw))
    assert read_good_lines(path) == lines
    assert [line.number for line in read_json_lines(path) if line.wrong] == [*range(2, 2 * len(lines) + 1, 2)]
