"""Hostile and damaged archives: each is refused in one line, at once, in little memory; nothing is run."""

import gc
import os
import pickle
import re
import struct
import sys
import time
import tracemalloc
import zipfile
from io import BytesIO
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.damage import FORBIDDEN as NEVER
from support.damage import audited, damaged, fuzz
from trilith.checkpoints import foreign_format
from trilith.parallel_state import BadInput
from trilith.storage.torch_archive import open_state_dict, read_records

#: Events of Python that tell of something run or imported.
FORBIDDEN = (*NEVER, "import", "compile", "socket.connect")
SECONDS, BYTES = 1.0, 100 << 20


class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def packed(pickled, *, order=b"little", **entries):
    """Return an archive as torch.save writes it, with this pickle and right checksums."""
    made = BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", order)
        for key, data in ({"0": bytes(64)} | entries).items():
            archive.writestr(f"archive/data/{key}", data)
    return made.getvalue()


def text(words):
    return b"X" + struct.pack("<I", len(words)) + words.encode()


def name(dotted):
    module, _, last = dotted.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def number(value):
    return b"J" + struct.pack("<i", value)


def storage(key=text("0"), count=number(16)):
    return b"(" + text("storage") + name("torch.FloatStorage") + key + text("cpu") + count + b"tQ"


def tensor(shape=number(4), stride=number(1), offset=number(0), of=b""):
    """Return the opcodes of a dict with one tensor, of one dim."""
    rest = b"\x89" + name("collections.OrderedDict") + b")R"
    call = b"(" + (of or storage()) + offset + shape + b"\x85" + stride + b"\x85" + rest + b"tR"
    return b"\x80\x02}" + text("w") + name("torch._utils._rebuild_tensor_v2") + call + b"s."


LONG = b"\x8b"
PICKLES = {
    "os.system": pickle.dumps(Calls(os.system, "touch here"), 2),
    "os.system in protocol 4": pickle.dumps({"w": Calls(os.system, "touch here")}, 4),
    "eval": pickle.dumps({"w": Calls(eval, "1/0")}, 2),
    "exec in an old opcode": b"(S'1/0'\ni__builtin__\nexec\n.",
    "getattr": pickle.dumps([Calls(getattr, Calls(__import__, "os"), "system")], 2),
    "an unknown class": pickle.dumps({"w": Calls(Random, 3)}, 2),
    "a class of this test": b"\x80\x02" + name("__main__.Weights") + b")\x81.",
    "a name that is called as an object": b"\x80\x02" + name("torch.float32") + b"}" + b"R.",
    "torch.load inside": b"\x80\x02" + name("torch.serialization.load") + text("x") + b"\x85R.",
    "an object of objects": b"\x80\x02" + name("torch.device") + b")R)R.",
    "a state for a number": b"\x80\x02K\x01}b.",
    "a state for a tensor": tensor()[:-2] + b"(K\x00tbs.",
    "a state for a storage": tensor(of=storage() + b"(K\x00tb"),
    "a state for a name": b"\x80\x02" + name("torch.float32") + b"}b.",
    "a state for a record twice": b"\x80\x02" + name("torch.device") + b")R}b}b.",
    "an item for a record": b"\x80\x02" + name("torch.device") + b")RK\x01K\x02s.",
    "a key that nests": b"\x80\x02}" + b")" + b"\x85" * 90_000 + b"K\x01s.",
    "deep lists": b"\x80\x02" + b"]" * 400_000 + b"a" * 399_999 + b".",
    "deep marks": b"\x80\x02" + b"(" * 500_000 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 900_000 + b".",
    "shared lists": b"\x80\x02]" + b"".join(b"q%c](h%ch%ce" % (n, n, n) for n in range(250)) + b".",
    "shared dicts": b"\x80\x02}"
    + b"".join(b"q%c}(%bh%c%bh%cu" % (n, text("a"), n, text("b"), n) for n in range(250))
    + b".",
    "a long name before many": b"\x80\x02}"
    + (text("a" * (1 << 20)) + b"}(" + b"".join(number(n) + b"}" for n in range(1000)) + b"us."),
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a dict in itself": b"\x80\x02}q\x00" + text("w") + b"h\x00s.",
    "a key of tuples in tuples": b"\x80\x02}" + b")\x85\x85K\x01s.",
    "a key whose tuples are shared": b"\x80\x02)"
    + b"".join(b"q%ch%c\x86" % (n, n) for n in range(99))
    + b"}h\x62K\x01s.",
    "a place in the memo that is far": b"\x80\x02}r\xff\xff\xff\xff.",
    "a place of 20 million in nine bytes": b"\x80\x02}r" + struct.pack("<I", 20_000_000) + b".",
    "a frame of 2^62": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"}.",
    "a place in the memo that is empty": b"\x80\x02j\xff\xff\xff\xff.",
    "an integer of 2 GB": b"\x80\x02" + LONG + struct.pack("<i", 2**31 - 1) + b"\x01" * 1000 + b".",
    "an integer of a negative size": b"\x80\x02" + LONG + struct.pack("<i", -5) + b".",
    "an integer of 4 MB": b"\x80\x02" + LONG + struct.pack("<i", 4 << 20) + b"\x01" * (4 << 20) + b".",
    "an integer of digits": b"I" + b"9" * 100_000 + b"\n.",
    "a text of 2 GB": b"\x80\x02X" + struct.pack("<I", 2**31) + b"a.",
    "a text of 2^63": b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b"a.",
    "bytes of 2^62": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"a.",
    "a text of 4 MB": b"\x80\x02" + text("a" * (4 << 20)) + b".",
    "no end": b"\x80\x02}",
    "nothing": b"",
    "an empty stack": b"\x80\x02a.",
    "an unknown opcode": b"\x80\x02\xfe.",
    "a text in a codec that would be imported": b"Vtext\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "a module for a storage": tensor(of=storage().replace(text("storage"), text("module"))),
    "a size of -1": tensor(shape=number(-1)),
    "a size of 2^40": tensor(shape=b"\x8a\x06" + struct.pack("<q", 2**40)[:6]),
    "a stride of 2^40": tensor(stride=b"\x8a\x06" + struct.pack("<q", 2**40)[:6]),
    "an offset of -8": tensor(offset=number(-8)),
    "elements that share bytes": tensor(stride=number(0)),
    "a size that is a text": tensor(shape=text("4")),
    "a storage that is none": tensor(of=b"N"),
    "a storage elsewhere": tensor(of=storage(key=text("../../../etc/passwd"))),
    "a storage with a key that nests": tensor(of=storage(key=b"]" * 2)),
    "a storage of another size": tensor(of=storage(count=number(17))),
    "a storage of many": tensor(of=storage(count=b"\x8a\x08" + struct.pack("<q", 2**62))),
    "a reference without a storage": b"\x80\x02K\x01Q.",
    "a storage of a type that is none": tensor(of=storage().replace(b"FloatStorage", b"float32")),
    "a storage whose key is a number": tensor(of=storage(key=number(0))),
    "a shape without strides": tensor().replace(number(1) + b"\x85", b")"),
    "a dtype that is a text": tensor().replace(b"_v2", b"_v3").replace(b"tRs.", text("F32") + b"tRs."),
    "a parameter of nothing": b"\x80\x02" + name("torch._utils._rebuild_parameter") + b")R.",
    "an ordered dict with arguments": b"\x80\x02" + name("collections.OrderedDict") + b"]\x85R.",
}


def refused(read, path):
    """Return the message with which ``path`` is refused: at once, in little memory, with nothing run."""
    known = {*sys.modules}
    tracemalloc.start()
    began = time.process_time()
    try:
        with audited(*FORBIDDEN) as seen, pytest.raises(BadInput) as error:
            read(path)
        took, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(error.value)
    assert not seen and {*sys.modules} == known
    assert peak < BYTES, f"{peak:,}"
    assert took < 60 * SECONDS, took  # tracing makes it slow: without tracing below
    assert "\n" not in message and len(message) < 1000 and str(path.name) in message
    return message


def read_dcp(path):
    foreign_format(path.parent).read(path.parent)


def refused_at_once(path):
    """Return whether it is refused within its processor time, which is longer beside a loaded core."""
    began = time.process_time()
    with pytest.raises(BadInput):
        open_state_dict(path)
    return time.process_time() - began < SECONDS


#: Parts of messages that say what Python's own reader would suffer from, or what to do.
SAYS = {
    "os.system": "found 'posix.system'. A pickle can run what it names; this one is not run",
    "a state for a tensor": "a state for a tensor",
    "a state for a storage": "a state for a storage",
    "a key whose tuples are shared": "a key of text or numbers",
    "deep tuples": "at most 100 tuples inside one another",
    "a place of 20 million in nine bytes": "place 0 of the memo, the next one",
    "a frame of 2^62": "a frame before the end",
    "a text of 2 GB": "before the end",
    "an integer of 4 MB": "an opcode that torch writes",
    "elements that share bytes": "contiguous()",
    "a storage of a type that is none": "no storage of a type",
    "a storage whose key is a number": "without a key",
    "a shape without strides": "shape [4] with strides []",
    "a dtype that is a text": "no dtype",
    "a parameter of nothing": "a parameter without a tensor",
    "an ordered dict with arguments": "an ordered dict with arguments",
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_hostile_pickle_is_refused_and_nothing_of_it_is_run(kind, tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(packed(PICKLES[kind]))
    assert SAYS.get(kind, "") in refused(open_state_dict, path)
    gc.freeze()  # the collector looks at what this file makes, not at what other tests left
    assert any(refused_at_once(path) for _ in range(3))
    assert [*tmp_path.iterdir()] == [path] and not Path("here").exists()


def test_a_pickle_of_more_opcodes_than_the_limit_is_refused_at_the_limit():
    assert read_records(b"\x80\x02]" + b"Na" * 498 + b".", "here", {}, opcodes=1000) == [None] * 498
    with pytest.raises(BadInput, match=r"at most 1,000 opcodes"):
        read_records(b"\x80\x02]" + b"Na" * 500 + b".", "here", {}, opcodes=1000)


@pytest.mark.parametrize("piece", [b"]a", b"}a", b")\x85a", b"]\x94a"])
def test_a_pickle_makes_no_more_containers_than_torch_needs_for_its_bytes(piece, size=500_000):
    raw = b"\x80\x04]" + piece * (size // len(piece)) + b"."
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match=r"at most one list, dict, tuple or record for 5 of [\d,]+ bytes"):
            read_records(raw, "pickle", {}, opcodes=1 << 60)
        assert tracemalloc.get_traced_memory()[1] < 50 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["os.system in protocol 4", "deep tuples"])
def test_a_hostile_metadata_of_DCP_is_refused_alike(kind, tmp_path):
    (tmp_path / ".metadata").write_bytes(PICKLES[kind])
    refused(read_dcp, tmp_path / ".metadata")


def put(raw, at, value):
    return raw[:at] + value + raw[at + len(value) :]


def central(raw, entry, field, value):
    """Change a field, by its offset, of an entry in the directory of an archive."""
    at = -1
    for _ in range(entry + 1):
        at = raw.index(b"PK\x01\x02", at + 1)
    return put(raw, at + field, value)


def end_of(raw, field, value):
    return put(raw, raw.rindex(b"PK\x05\x06") + field, value)


GOOD = packed(tensor())


def overlapping():
    """Return an archive with an entry whose header and bytes lie inside of another entry's bytes."""
    inner = BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("archive/data/1", bytes(64))
    local = inner.getvalue()[: inner.getvalue().index(b"PK\x01\x02")]
    raw = packed(tensor(), **{"1": bytes(64), "2": local})
    return central(raw, 3, 42, struct.pack("<I", raw.index(local, raw.index(local) + 1)))


ARCHIVES = {
    "compressed": (central(GOOD, 0, 10, b"\x08\x00"), "compressed"),
    "encrypted": (central(GOOD, 0, 8, b"\x01\x00"), "encrypted"),
    "overlapping": (central(GOOD.replace(b"e/byteorder", b"e/data.pkl2", 1), 1, 42, bytes(4)), "header of"),
    "one inside another": (overlapping(), "overlap"),
    "oversized": (central(GOOD, 2, 20, b"\xff\xff\xff\x7f" * 2), "before the"),
    "two sizes": (central(GOOD, 2, 24, b"\x01\x00\x00\x00"), "bytes of"),
    "far away": (central(GOOD, 2, 42, b"\xff\xff\xff\x7f"), "an archive from"),
    "another name": (GOOD.replace(b"archive/data/0", b"archive/data/9", 1), "header of"),
    "65,535 entries": (end_of(GOOD, 10, b"\xff\xff"), "entries"),
    "a directory of 4 GB": (end_of(GOOD, 12, b"\xfe\xff\xff\xff"), "entries in"),
    "a directory elsewhere": (end_of(GOOD, 16, b"\x00\x00\x00\x00"), "directory"),
    "no end": (GOOD[:-1], "the end of a zip"),
    "an altered pickle": (GOOD.replace(text("w"), text("v"), 1), "CRC-32"),
    "no pickle": (GOOD.replace(b"data.pkl", b"data.plk"), "data.pkl"),
    "big-endian": (packed(tensor(), order=b"big"), "byteorder: expected little, found b'big'"),
    "an altered byte order": (GOOD.replace(b"little", b"bigend"), "byteorder: expected CRC-32"),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_a_hostile_zip_is_refused(kind, tmp_path):
    raw, message = ARCHIVES[kind]
    path = tmp_path / "model.bin"
    path.write_bytes(raw)
    assert re.search(message, refused(open_state_dict, path))


def test_the_archive_that_these_were_made_of_is_read(tmp_path):
    (tmp_path / "model.bin").write_bytes(GOOD)
    assert open_state_dict(tmp_path / "model.bin").read("w").tolist() == [0.0] * 4
    twice = BytesIO()
    with zipfile.ZipFile(twice, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        for _ in range(2):
            archive.writestr("archive/data.pkl", b"\x80\x02}.")
    (tmp_path / "twice.bin").write_bytes(twice.getvalue())
    with pytest.raises(BadInput, match="twice"):
        open_state_dict(tmp_path / "twice.bin")


@pytest.mark.parametrize(("place", "message"), [(32, "entries"), (0, "the directory of a zip archive")])
def test_a_damaged_end_of_64_bits_is_refused(place, message, tmp_path):
    torch.save({"w": torch.arange(4)}, tmp_path / "model.bin")
    raw = bytearray((tmp_path / "model.bin").read_bytes())
    raw[raw.rindex(b"PK\x06\x06") + place] ^= 1
    (tmp_path / "model.bin").write_bytes(raw)
    assert message in refused(open_state_dict, tmp_path / "model.bin")


def test_a_tensor_behind_many_other_entries_is_read(tmp_path):
    vocabulary = {str(number): number for number in range(100_001)}
    torch.save(vocabulary | {"w": torch.arange(4)}, tmp_path / "model.bin")
    assert open_state_dict(tmp_path / "model.bin").read("w").tolist() == [0, 1, 2, 3]


def read_all(path):
    file = open_state_dict(path)
    for key in file.tensors:
        file.read(key)


@pytest.mark.parametrize(
    "count", [pytest.param(150, id="few"), pytest.param(7_000, id="many", marks=[pytest.mark.slow])]
)
@pytest.mark.parametrize("kind", ["pickle with right sums", "archive", "metadata of DCP"])
@pytest.mark.timeout(3000)
def test_damaged_archives_are_read_or_refused_and_import_nothing(kind, count, tmp_path):
    random, saved, path = Random(16), BytesIO(), tmp_path / "model.bin"
    torch.save({"a": torch.arange(6.0).view(2, 3).T, "b": torch.nn.Parameter(torch.ones(2))}, saved)
    with zipfile.ZipFile(saved) as archive:
        pickled = archive.read("archive/data.pkl")
        entries = {name[-1]: archive.read(name) for name in archive.namelist() if "/data/" in name}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.ones(3, 4), "n": 5}, checkpoint_id=tmp_path / "dcp")
    metadata = (tmp_path / "dcp" / ".metadata").read_bytes()
    read_dcp(tmp_path / "dcp" / ".metadata")
    read, path, make = {
        "pickle with right sums": (read_all, path, lambda: packed(damaged(pickled, random, 2), **entries)),
        "archive": (read_all, path, lambda: damaged(saved.getvalue(), random, 2)),
        "metadata of DCP": (read_dcp, tmp_path / "dcp/.metadata", lambda: damaged(metadata, random, 2)),
    }[kind]
    assert 0 < fuzz(read, path, count, make, FORBIDDEN) < count / 2
