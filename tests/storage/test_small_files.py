"""One reader for small files: a regular file, a limit, UTF-8, one meaning; anything else is one line."""

import errno
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trilith.parallel_state import MachineFailed
from trilith.storage.small_files import read_good_lines, read_json, read_json_lines, read_toml


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
