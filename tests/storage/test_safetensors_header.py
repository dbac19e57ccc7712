"""Bad safetensors bytes are refused, each with one line that names the file, fast and without allocating."""

import json
import os
import re
import resource
import struct
import time

import pytest
import torch
from safetensors.torch import save_file
from trilith.parallel_state import BadCheckpoint, BadInput
from trilith.storage import TensorFile, safetensors_header

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def framed(header, data=bytes(8), length=None):
    """Return a file with this header, which is JSON unless it is bytes already."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def one_tensor(**changes):
    """Return a file of one tensor ``w`` of two floats, with some fields changed; ``None`` omits a field."""
    return framed({"w": {key: value for key, value in (F32 | changes).items() if value is not None}})


def two_tensors(a, b, data=16):
    """Return a file of two tensors of bytes at these offsets."""
    names = {"a": a, "b": b}.items()
    entries = {name: {"dtype": "U8", "shape": [at[1] - at[0]], "data_offsets": at} for name, at in names}
    return framed(entries, bytes(data))


def empty_tensors(count):
    entry = '"t%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return framed(("{" + ",".join(entry % i for i in range(count)) + "}").encode(), b"")


GOOD = one_tensor()
SAME_KEY = b'{"w":%s,"w":%s}'
AS_JSON = json.dumps(F32).encode()
LATER = json.dumps(F32 | {"data_offsets": [8, 16]}).encode()
DEEP = b'{"w":' + b"[" * 200_000 + b"]" * 200_000 + b"}"


BYTES = {
    "A1-empty": (b"", "0 bytes"),
    "A2-seven-bytes": (b"\0" * 7, "7 bytes. .*copy"),
    "A3-header-truncated": (GOOD[:30], "cut short: copy"),
    "A4-data-truncated": (GOOD[:-1], "'w'.*cut short"),
    "A5-trailing-bytes": (GOOD + b"tail", "the end of tensor 'w'"),
    "A6-length-2-to-63": (framed(b"{}", length=1 << 63), "header length"),
    "A7-length-2-to-64-less-1": (framed(b"{}", length=(1 << 64) - 1), "header length"),
    "A8-length-200-MB": (framed(b"{}", bytes(190), length=200 << 20), "header length"),
    "A9-length-too-short": (framed({"w": F32}, length=20), "valid JSON"),
    "A10-length-0": (framed(b"", length=0), "header length"),
    "A11-not-JSON": (framed(b"{hello}"), "valid JSON"),
    "A12-array": (framed([{"w": F32}]), "JSON object"),
    "A13-bad-UTF-8": (framed(b'{"\xff":1}'), "UTF-8"),
    "A14-duplicate-key": (framed(SAME_KEY % (AS_JSON, AS_JSON)), "key 'w' twice"),
    "A15-duplicate-key-other-range": (framed(SAME_KEY % (AS_JSON, LATER), bytes(16)), "key 'w' twice"),
    "A16-overlap": (two_tensors((0, 8), (4, 16)), "'b'.*overlap"),
    "A17-hole": (two_tensors((0, 4), (8, 16)), "'b'.*hole"),
    "A17-hole-at-the-front": (two_tensors((2, 8), (8, 16)), "'a'.*hole after the header"),
    "A18-begin-after-end": (one_tensor(data_offsets=[8, 0]), "'w'.*in order"),
    "A19-end-past-file": (one_tensor(shape=[4], data_offsets=[0, 16]), "'w'.*cut short"),
    "A20-bytes-disagree": (one_tensor(shape=[3]), "'w'.*12 bytes for F32"),
    "A21-negative-dim": (one_tensor(shape=[-2]), "'w'.*whole numbers"),
    "A22-product-overflow": (one_tensor(shape=[1 << 62, 1 << 62]), r"'w'.*2\^63"),
    "A22-overflow-beside-0": (one_tensor(shape=[0, 1 << 62, 4], data_offsets=[0, 0]), r"'w'.*2\^63"),
    "A23-float-dim": (one_tensor(shape=[2.0]), "'w'.*whole numbers"),
    "A23-bool-dim": (one_tensor(shape=[True, 2]), "'w'.*whole numbers"),
    "A23-too-many-dims": (one_tensor(shape=[1] * 65), "'w'.*at most 64"),
    "A24-unknown-dtype": (one_tensor(dtype="F128"), "'w'.*dtype of the format.*F128"),
    "A25-missing-dtype": (one_tensor(dtype=None), "'w'.*dtype of the format"),
    "A25-entry-is-a-number": (framed({"w": 3}), "'w'.*an object"),
    "A27-metadata-number": (framed({"__metadata__": {"a": 1}, "w": F32}), "__metadata__ 'a'.*string"),
    "A27-metadata-list": (framed({"__metadata__": [], "w": F32}), "__metadata__"),
    "A28-deep-JSON": (framed(DEEP), "depth"),
    "A29-300000-empty-tensors": (lambda: empty_tensors(300_000), "at most"),
    "A29-one-tensor-too-many": (lambda: empty_tensors(100_001), "at most 100,000 tensors"),
    "A30-name-is-a-path": (framed({"../../etc/x": F32}), "etc/x"),
    "A30-newline-in-name": (framed({"a\nb": F32}), "printable"),
    "A35-git-lfs-pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    "A36-web-page": (b"<!DOCTYPE html><html>404</html>", "web page"),
    "A36-web-page-lower-case": (b"\n <html><body>Access denied</body></html>", "web page"),
}


def refusal(path):
    with pytest.raises(BadInput) as caught:
        TensorFile.open(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and len(message) < 600
    assert caught.value.exit_code == 2
    return message


@pytest.mark.parametrize("why", BYTES)
def test_bad_bytes_are_refused_at_once(tmp_path, why):
    raw, says = BYTES[why]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw() if callable(raw) else raw)  # large ones are made where they are read
    peak, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(3):  # the fastest counts: a collection of this process's garbage can fall into any of them
        begin = time.process_time()
        message = refusal(path)
        seconds.append(time.process_time() - begin)
        assert re.search(says, message)
    assert min(seconds) < 0.05
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100 << 10


def test_A26_extra_field_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(framed({"__metadata__": {"format": "pt"}, "w": F32 | {"comment": "by hand"}}))
    file = TensorFile.open(path)
    assert torch.equal(file.read("w"), torch.zeros(2))


def test_A30_name_like_a_path_is_read_where_it_is_expected(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(framed({"block/w": F32}))
    refusal(path)
    assert "block/w" in TensorFile.open(path, expected={"block/w"}).tensors


def test_A29_tensors_are_counted_however_their_fields_are_spelt(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", 2)
    path = tmp_path / "model.safetensors"
    path.write_bytes(framed(empty_tensors(3)[8:].replace(b"offsets", b"offset\\u0073"), b""))
    assert "at most 2 tensors, found 3" in refusal(path)


def test_A34_file_that_shrinks_is_an_error_and_no_signal(tmp_path, monkeypatch):
    """Before a read, and between a look at its size and the read itself."""
    path, pread = tmp_path / "model.safetensors", os.preadv

    def shrinking(*given):
        os.truncate(path, 4096)
        return pread(*given)

    save_file({"w": torch.arange(100_000)}, path)
    file = TensorFile.open(path)
    monkeypatch.setattr(os, "preadv", shrinking)
    for says in (r"'?w'?.*shrank", "changed since"):
        with pytest.raises(BadCheckpoint, match=says) as caught:
            file.read("w")
        assert caught.value.exit_code == 4
