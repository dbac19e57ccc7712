"""Safetensors files: what boxes write and read is what the library reads; checksums are of the disk."""

import errno
import os
import random
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trilith.parallel_state import BadCheckpoint, BadInput, Box, Piece
from trilith.storage import TensorFile, TensorWriter
from trilith.storage import safetensors_reader as tensor_file
from trilith.storage.catalog import Catalog, Key, LazyTensor, check_covered, in_one_file, listed, renamed
from trilith.storage.crc import Checksum, crc32_combine
from trilith.storage.disk import Disk, DiskFailed
from trilith.storage.dtypes import TORCH, name_of
from trilith.storage.strides import blocks


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combined_checksums_are_that_of_the_whole(a, b):
    assert crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_checksum_of_pieces_in_any_order_and_what_is_missing():
    data = random.Random(0).randbytes(1000)
    seen = Checksum()
    for begin, end in [(700, 1000), (0, 300), (400, 700), (400, 700)]:
        seen.add(begin, data[begin:end])
    assert seen.gaps(0, 1000) == [(300, 400)]
    for begin, end in [(250, 350), (350, 450), (350, 350)]:  # overlaps, or is empty: counts for nothing
        seen.add(begin, data[begin:end])
    assert seen.gaps(0, 1000) == [(300, 400)]
    seen.add(300, data[300:400])
    assert seen.gaps(0, 1000) == []
    assert seen.of(0, 1000) == zlib.crc32(data)
    assert Checksum().of(0, 0) == 0 and Checksum().gaps(0, 3) == [(0, 3)]


def test_memory_of_a_checksum_does_not_grow_with_the_file():
    seen, blocks = Checksum(), 20_000
    tracemalloc.start()
    for block in range(blocks):
        seen.add(4 * block, b"abcd")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 20_000
    assert seen.of(0, 4 * blocks) == zlib.crc32(b"abcd" * blocks)


def test_a_sum_reads_on_where_the_system_gives_less_than_was_asked_for(tmp_path, monkeypatch):
    data, whole = random.Random(0).randbytes(1000), os.preadv
    (tmp_path / "f").write_bytes(data)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:7]], at))
    seen = Checksum()
    with open(tmp_path / "f", "rb") as file:
        assert [at for at, _ in seen.read_gaps(file.fileno(), (0, 300), (300, 1000))] == [0, 300]
    assert seen.of(0, 1000) == zlib.crc32(data)


def test_no_call_writes_more_than_a_mebibyte(tmp_path, monkeypatch):
    """Larger ones are several times as slow on virtual machines (``storage/disk.py``)."""
    asked, whole = list[int](), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, part, at: asked.append(len(part)) or whole(fd, part, at))
    numbers = torch.arange(3 << 19, dtype=torch.float32)
    writer = TensorWriter(tmp_path / "w", {"w": ("F32", tuple(numbers.shape))})
    writer.write("w", Box.whole(tuple(numbers.shape)), numbers)
    writer.close()
    assert max(asked) == 1 << 20
    assert torch.equal(load_file(tmp_path / "w")["w"], numbers)


def test_a_sum_of_bytes_that_cannot_be_read_back_is_an_error(tmp_path, monkeypatch):
    writer = TensorWriter(tmp_path / "f", {"w": ("U8", (4, 4))})
    writer.write("w", Box((0, 0), (4, 2)), torch.ones(4, 2, dtype=torch.uint8))
    writer.write("w", Box((0, 2), (4, 4)), torch.ones(4, 2, dtype=torch.uint8))
    os.truncate(tmp_path / "f", 7)
    with pytest.raises(DiskFailed, match=f"{writer.size} bytes were written, 7 are there"):
        writer.close()
    os.truncate(tmp_path / "f", writer.size)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: 0)
    with pytest.raises(DiskFailed, match="cannot be read from byte"):
        writer.close()
    writer.abandon()


@pytest.mark.parametrize("threads", [1, 3])
def test_boxes_in_any_order_make_the_file_that_safetensors_reads(tmp_path, threads):
    tensors = {
        "z": torch.randn(17, 9).bfloat16(),
        "é": torch.randn(4, 5, 6),
        "aligned": torch.randn(2).double(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.zeros(0, 7, dtype=torch.int32),
        "odd": torch.randint(0, 255, (3,), dtype=torch.uint8),
    }
    spec = {name: (name_of(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
    writer = TensorWriter(tmp_path / "w.safetensors", spec, metadata={"format": "pt"})
    jobs = []
    for name, tensor in tensors.items():
        whole = Box.whole(tuple(tensor.shape))
        if tensor.ndim == 2 and tensor.numel():  # two halves by columns: strided writes
            halves = [whole.narrow(1, 0, 4), whole.narrow(1, 4, tensor.shape[1])]
            jobs += [(name, piece) for half in halves for piece in blocks(half, 20)]
        else:
            jobs += [(name, piece) for piece in blocks(whole, 7)]
    random.Random(1).shuffle(jobs)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda job: writer.write(*job, tensors[job[0]][job[1].slices].contiguous()), jobs))
    written = writer.close()

    raw = (tmp_path / "w.safetensors").read_bytes()
    assert (written.size, written.crc32) == (len(raw), zlib.crc32(raw))
    loaded = load_file(tmp_path / "w.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    ours = TensorFile.open(tmp_path / "w.safetensors")
    assert ours.tensors == writer.entries and ours.data_begin % 8 == 0
    assert all(entry.begin % 8 == 0 for entry in ours.tensors.values() if entry.dtype == "F64")


@pytest.mark.parametrize("name", sorted(TORCH))
def test_every_type_that_torch_holds_is_written_and_read(tmp_path, name):
    whole = torch.randint(0, 255, (6, 16), dtype=torch.uint8)
    whole = whole.bool() if name == "BOOL" else whole.view(TORCH[name])
    writer = TensorWriter(tmp_path / "w", {"t": (name, tuple(whole.shape))})
    writer.write("t", Box.whole(tuple(whole.shape)), whole)
    with mock.patch.object(os, "preadv"):  # what came in one run was summed up in memory
        writer.close()
    save_file({"t": whole}, tmp_path / "theirs")
    theirs = TensorFile.open(tmp_path / "theirs")
    assert theirs.tensors["t"].dtype == name
    for tensor in (load_file(tmp_path / "w")["t"], theirs.read("t")):
        assert torch.equal(tensor.view(torch.uint8), whole.view(torch.uint8))


def test_an_element_left_out_is_no_finished_file(tmp_path):
    writer = TensorWriter(tmp_path / "w", {"t": ("F32", (4,))})
    writer.write("t", Box((0,), (3,)), torch.zeros(3))
    with pytest.raises(AssertionError, match="'t': 1"):
        writer.close()
    writer.abandon()


def test_an_existing_file_is_never_written_over(tmp_path):
    (tmp_path / "w").write_bytes(b"mine")
    with pytest.raises(DiskFailed, match="File exists"):
        TensorWriter(tmp_path / "w", {})
    assert (tmp_path / "w").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        pytest.param(errno.ENOSPC, "No space left", id="G21-disk-full"),
        pytest.param(errno.EDQUOT, "quota", id="G22-quota"),
        pytest.param(errno.EFBIG, "too large", id="G22-file-too-large"),
    ],
)
def test_disk_that_refuses(tmp_path, monkeypatch, code, says):
    write = Disk.write

    def full(disk, fd, data, offset):
        if offset + len(data) > 8192:  # of so many bytes there is room
            raise OSError(code, os.strerror(code))
        write(disk, fd, data, offset)

    monkeypatch.setattr(Disk, "write", full)
    writer = TensorWriter(tmp_path / "w", {"t": ("F32", (4096,))})
    with pytest.raises(DiskFailed, match=f"w: cannot be written: .*{says}") as caught:
        writer.write("t", Box((0,), (4096,)), torch.zeros(4096))
    assert caught.value.exit_code == 3
    writer.abandon()


def random_box(shape, rng):
    bounds = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 7), max_size=4), st.sampled_from(["BF16", "F64", "I8"]), st.randoms())
def test_any_box_of_any_tensor(tmp_path, shape, dtype, rng):
    whole = torch.randint(0, 100, tuple(shape)).to(TORCH[dtype])
    save_file({"w": whole, "before": torch.zeros(3)}, tmp_path / "t.safetensors")
    file = TensorFile.open(tmp_path / "t.safetensors")
    for _ in range(4):
        box = random_box(tuple(shape), rng)
        assert torch.equal(file.read("w", box), whole[box.slices])
    raw = (tmp_path / "t.safetensors").read_bytes()
    ranges = b"".join(raw[at : at + n] for at, n in file.byte_ranges("w", box))
    assert ranges == whole[box.slices].contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("columns", [3, 512, 5000])
@pytest.mark.parametrize("width", [10_000, 600_000])
def test_columns_by_runs_and_by_scratch(tmp_path, columns, width):
    whole = torch.randn(24, width).bfloat16()
    save_file({"w": whole}, tmp_path / "t.safetensors")
    file = TensorFile.open(tmp_path / "t.safetensors")
    assert torch.equal(file.read("w", Box((5, 77), (20, 77 + columns))), whole[5:20, 77 : 77 + columns])


def test_columns_take_constant_extra_memory(tmp_path):
    save_file({"w": torch.zeros(2048, 4096)}, tmp_path / "t.safetensors")  # 32 MB
    file = TensorFile.open(tmp_path / "t.safetensors")
    box = Box((0, 8), (2048, 16))
    out = torch.empty(box.shape)
    tracemalloc.start()
    file.read("w", box, out=out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * tensor_file._SCRATCH


PAIRS = torch.arange(16.0).view(8, 2)


@pytest.fixture
def stored(tmp_path):
    save_file({"pairs": PAIRS, "other": torch.ones(8, 2, dtype=torch.float16)}, tmp_path / "f")
    file = TensorFile.open(tmp_path / "f")
    return Catalog({name: in_one_file(file, name) for name in file.tensors})


def halves(*others):
    """Return the pieces of a matrix whose even rows come first and then the odd ones."""
    rows = (Box((0, 0), (4, 2)), Box((4, 0), (8, 2)))
    return [Piece(box, "pairs", (odd, 0), (0, 1), (2, 1)) for odd, box in enumerate(rows)] + [*others]


def test_rows_that_take_turns_are_read_in_one_go_and_only_their_own_numbers_are_looked_at(stored):
    tensor = renamed(stored, {"w": halves()})["w"]
    with mock.patch.object(TensorFile, "read", autospec=True, side_effect=TensorFile.read) as reads:
        assert torch.equal(tensor.read(), torch.cat([PAIRS[::2], PAIRS[1::2]]))
    assert reads.call_count == 1
    flawed = PAIRS.clone()
    flawed[1] = float("nan")
    save_file({"pairs": flawed}, path := next(iter(tensor.near(tensor.box))).stored.file.path)
    tensor = renamed({"pairs": in_one_file(TensorFile.open(path), "pairs")}, {"w": halves()})["w"]
    assert torch.equal(tensor.read(Box((0, 0), (4, 2))), PAIRS[::2])
    with pytest.raises(BadInput, match="w: expected finite numbers"):
        tensor.read()


def test_tensors_that_are_not_there_whole_are_refused(stored):
    assert "w" not in renamed(stored, {"w": [Piece.plain(Box((0,), (1,)), "missing")]})
    with pytest.raises(BadCheckpoint, match="w: expected a tensor"):
        Catalog()["w"]
    both = halves(Piece.plain(Box((8, 0), (16, 2)), "other"))
    with pytest.raises(BadInput, match=r"here: w: expected one dtype, found F16 in .*, F32 in"):
        renamed(stored, {"w": both}, "here")
    key = next(iter(stored["pairs"].near(Box((0, 0), (1, 1))))).stored
    holed = LazyTensor("w", "F32", (8, 2), listed([Piece.plain(Box((0, 0), (7, 2)), Key(*key))]))
    with pytest.raises(BadCheckpoint, match="w: expected each of 16 elements once, found 14"):
        holed.read()
    with pytest.raises(BadInput, match="here: w: expected each element once"):
        check_covered("here", {"w": holed})
