"""Small files that have one meaning; files, outputs and folders that cannot be are refused, unchanged."""

import errno
import json
import os
from contextlib import chdir
from pathlib import Path
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.damage import truncate
from support.refusals import Refused, refusals
from trilith.checkpoints import read_source
from trilith.parallel_state import Box
from trilith.storage import TensorFile
from trilith.storage.file_names import SOURCES, kind_of_folder
from trilith.storage.output_places import check_output
from trilith.storage.safe_open import read_small
from trilith.storage.small_files import (
    log_line,
    read_good_lines,
    read_json,
    read_json_lines,
    read_text,
    read_toml,
)
from trilith.storage.strides import check_coverage
from trilith.storage.torch_archive import open_state_dict

READERS = {
    "text": read_text,
    "json": read_json,
    "toml": read_toml,
    "json-lines": lambda path: list(read_json_lines(path)),
    "A31-A32-A33-safetensors": TensorFile.open,
}


def write(raw):
    return lambda folder: (folder / "a").write_bytes(raw)


def sparse(folder):
    with (folder / "a").open("wb") as file:
        file.truncate(10 << 30)


def links_to(target):
    return lambda folder: (folder / "a").symlink_to(target)


def file_for(name, why, given, says):
    return Refused(f"{name}-{why}", lambda folder: READERS[name](folder / "a"), says, given=given)


test_files_that_are_no_small_files_are_refused = refusals(
    file_for(name, why, given, f"^a: .*({says})")
    for name in READERS
    for why, given, says in (
        ("missing", lambda folder: None, "nothing there"),
        ("broken-link", links_to("nowhere"), "a link to nowhere, which is absent"),
        ("link-loop", links_to("a"), "symbolic links"),
        ("pipe", lambda folder: os.mkfifo(folder / "a"), "a pipe"),
        ("device-without-end", links_to("/dev/zero"), "a device"),
        ("empty-device", links_to("/dev/null"), "a device"),
        ("folder", lambda folder: (folder / "a").mkdir(), "a directory"),
        ("10-GB", sparse, "bytes"),
        ("no-text", write(b"\xff\xfe\x00"), "expected UTF-8 text, found byte 0xff at 0"),
        ("archive", lambda folder: torch.save({}, folder / "a"), "an archive, such as torch.save writes"),
        ("git-lfs", write(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "git lfs pull"),
    )
    if name in ("text", "json", "toml") or why not in ("no-text", "archive", "git-lfs", "10-GB")
)


def disturbed(why, says, function, **effect):
    def call(folder):
        with patch.object(os, function, **effect):
            read_small(folder / "a", 4)

    return Refused(why, call, f"^a: .*{says}", given=write(b"{}"))


test_files_that_change_while_they_are_read_are_refused = refusals(
    disturbed("swapped", "changed while it was opened", "open",
              new=lambda path, flags, real=os.open: real("/dev/null", flags)),
    disturbed("grows", "found a file that grows", "read", return_value=bytes(5)),
    disturbed("unreadable", "Invalid argument", "read", side_effect=OSError(errno.EINVAL, "")),
    Refused("a-NUL-in-a-path", lambda folder: read_small(Path("a\0b"), 4), r"a\\x00b': .*null byte"),
)  # fmt: skip

AMBIGUOUS = {
    "json": [
        *('{"a": 1, "a": 2}', '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', "[1]", ""),
        *('{"a": "\\ud800"}', '{"a": ' + "[" * 101 + "]" * 101 + "}", "[" * 100_000),
        *('{"a": ' * 101 + "1" + "}" * 101, '{"a": 1} {"b": 2}', '{"a": ' + "9" * 5000 + "}"),
        '\ufeff{"a": 1}',
    ],
    "toml": [
        *("a = nan", "a = -inf", "a = 1e999", "a = 1\na = 2", "a = ["),
        *("a = " + "[" * 5000, "a = " + "9" * 5000),
    ],
}
test_files_with_no_one_meaning_are_refused = refusals(
    file_for(name, f"{number}", write(text.encode()), "^a: ")
    for name, texts in AMBIGUOUS.items()
    for number, text in enumerate(texts)
)


def output(why, says, given=lambda out: None, name="out", **options):
    def call(folder):
        check_output(folder / name, **{key: value(folder / name) for key, value in options.items()})

    return Refused(why, call, f"{name}.*{says}", given=lambda folder: given(folder / name))


def occupied(out):
    out.mkdir()
    (out / "mine").touch()


def begin_in(folder, output):
    with chdir(folder):
        check_output(Path(output))


def mounted(out):
    with patch.object(Path, "is_mount", lambda path: path == out):
        check_output(out)


test_outputs_that_cannot_be_are_refused = refusals(
    Refused(
        "G18-mount",
        lambda folder: mounted(folder / "out"),
        "a mount point",
        given=lambda folder: (folder / "out").mkdir(),
    ),
    output("G16-occupied", "with files in it", occupied),
    output("G17-the-input", "outside the input", Path.mkdir, inputs=lambda out: [out.parent / "." / "out"]),
    output("G17-inside-the-input", "outside the input", inputs=lambda out: [out.parent]),
    output("G18-file", "found a file", Path.touch),
    output("G18-link", "a link", lambda out: out.symlink_to(out.parent)),
    Refused("G16-here", lambda folder: begin_in(folder, "."), "the folder that the command runs in"),
    Refused("G16-here-by-its-path", lambda folder: begin_in(folder, folder), "command runs in"),
    output("G20-too-little-space", r"expected [\d,.]+ EB free.*found [\d,.]+ [MGT]B", need=lambda _: 1 << 60),
    output("G24-name-that-no-file-system-takes", "at most 255 bytes", name="x" * 256),
)


def archive(why, says, damage=lambda path: None, code=2, **options):
    def given(folder):
        torch.save({"a": torch.arange(60.0)}, folder / "a", **options)
        damage(folder / "a")

    return Refused(why, lambda folder: open_state_dict(folder / "a"), says, code, given)


def alter(path):
    path.write_bytes(path.read_bytes().replace(b"FloatStorage", b"floatStorage", 1))


test_archives_that_are_not_read_are_refused = refusals(
    archive("altered-pickle", "CRC-32", alter, code=4),
    archive("a-name-twice", r"'a\.b': expected a printable name, once",
            lambda path: torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, path)),
    archive("a-name-of-a-line-end", "expected a printable name",
            lambda path: torch.save({"a\nb": torch.ones(1)}, path)),
    archive("cut-short", "cut short", lambda path: truncate(path, -100)),
    archive("before-zip-archives", "before torch 1.6.*torch.save or as safetensors",
            _use_new_zipfile_serialization=False),
)  # fmt: skip


def packed_elements(folder):
    header = b'{"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    (folder / "t.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    assert TensorFile.open(folder / "t.safetensors").tensors["w"].dtype == "F4"


def beyond(why, box):
    says = r"here: w: .*boxes inside \[8, 6\]"
    return Refused(why, lambda _: check_coverage("here", "w", (8, 6), [box]), says, 4)


test_tensors_that_are_not_whole_are_refused = refusals(
    Refused("packed-elements", lambda folder: TensorFile.open(folder / "t.safetensors").read("w"),
            "w: .*F4.*Quantised", given=packed_elements),
    beyond("beyond-the-tensor", Box.whole((9, 6))),
    beyond("of-fewer-dims", Box.whole((8,))),
)  # fmt: skip


def names(*paths):
    """Return what makes these files and folders; a path that ends in a slash is a folder."""

    def given(folder):
        for name in paths:
            (folder / name).mkdir(parents=True) if name.endswith("/") else (folder / name).write_text("{}")

    return given


def source(why, says, *paths, code=4, name="."):
    return Refused(why, lambda folder: read_source(folder / name), says, code, names(*paths))


MODEL = ("config.json", "model.safetensors")
UNFINISHED = ".tmp-0123456789abcdef"

test_folders_that_are_no_source_are_refused = refusals(
    source("run-without-checkpoints", "a directory of checkpoints", "metrics.jsonl"),
    source("run-with-an-unfinished-checkpoint", "unfinished: step-00000001",
           "metrics.jsonl", f"checkpoints/step-00000001{UNFINISHED}/"),
    source("unfinished-conversion", "unfinished", f"out{UNFINISHED}/",
           *(f"out{UNFINISHED}/{file}" for file in MODEL), code=2, name=f"out{UNFINISHED}"),
    Refused("newest-step-is-named-whatever-its-width", lambda folder: kind_of_folder(folder, SOURCES),
            "step-00000010 for a folder of checkpoints",
            given=names(*MODEL, "step-9/", "step-00000010/", "step-8/")),
)  # fmt: skip


def test_a_byte_order_mark_is_left_out(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert read_toml(tmp_path / "a") == {"a": 1}
    line = log_line({"a": 1})
    (tmp_path / "a").write_text(f"{line}\n{line}", encoding="utf-8-sig")
    assert read_good_lines(tmp_path / "a") == [{"a": 1}] * 2


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
