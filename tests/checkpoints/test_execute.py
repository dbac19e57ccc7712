"""Carrying out plans: any cut into any other, bit for bit, no byte read twice, in constant memory."""

import itertools
import os
import random
import threading
import zlib
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.draws import drawn
from trilith.checkpoints.convert.execute import Work
from trilith.checkpoints.convert.plan import Transfer
from trilith.parallel_state import BadInput, Box, Piece
from trilith.storage import TensorFile, TensorWriter
from trilith.storage.catalog import Key, LazyTensor, listed
from trilith.storage.catalog import in_one_file as in_file
from trilith.storage.crc import Checksum
from trilith.storage.dtypes import Look, look_at, name_of
from trilith.storage.small_files import FinishedWork


def cut(shape, cuts):
    """Cut a tensor into a grid; ``cuts`` gives the inner bounds of some dims."""
    bounds = [[0, *sorted(cuts.get(dim, ())), n] for dim, n in enumerate(shape)]
    grid = itertools.product(*(itertools.pairwise(each) for each in bounds))
    return [Box(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in grid]


def store(directory, name, whole, boxes):
    for i, box in enumerate(boxes):
        save_file({name: whole[box.slices].contiguous()}, directory / f"{i}.safetensors")
    return [TensorFile.open(directory / f"{i}.safetensors") for i in range(len(boxes))]


def lazy(files, name, whole, boxes):
    """Return the tensor of which each file has a box."""
    parts = listed(Piece.plain(box, Key(file, name)) for file, box in zip(files, boxes, strict=True))
    return LazyTensor(name, name_of(whole.dtype), tuple(whole.shape), parts)


def in_one_file(folder, whole):
    """Write a tensor into one file; return what plans a part of it in some dtype."""
    box = Box.whole(tuple(whole.shape))
    known = lazy(store(folder, "w", whole, [box]), "w", whole, [box])

    def transfer(dtype="F32", part=box):
        return Transfer("w", part, tuple(known.pieces(part)), dtype)

    return transfer


@st.composite
def reshards(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))

    def some():
        return {dim: draw(st.lists(st.integers(0, n), max_size=3)) for dim, n in enumerate(shape)}

    return shape, cut(shape, some()), cut(shape, some())


@settings(max_examples=drawn(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reshards(), st.integers(1, 3), st.integers(8, 200), st.integers(1, 3))
def test_any_cut_into_any_other_reads_every_byte_once(tmp_path, case, copies, block, threads):
    """However many replicas there are of each part."""
    shape, old, new = case
    for path in tmp_path.iterdir():
        path.unlink()
    whole = torch.randn(shape).bfloat16()
    stored = lazy(store(tmp_path, "w", whole, old), "w", whole, old)
    plan = [Transfer("w", box, tuple(stored.pieces(box)), "BF16") for box in new * copies]
    sizes = []
    with mock.patch.object(TensorFile, "read", autospec=True, side_effect=TensorFile.read) as read:
        made, _ = executed(tmp_path, plan, threads=threads, block=block, progress=sizes.append)
    assert sum(call.kwargs["out"].nbytes for call in read.call_args_list) == whole.nbytes
    assert sum(sizes) == copies * whole.nbytes
    assert all(torch.equal(tensor, whole[box.slices]) for tensor, box in zip(made, new * copies, strict=True))


def executed(folder, plan, threads=2, **options):
    """Carry out a plan, each of its tensors in a file of its own; return these, and the tallies.

    Sums that were taken as the numbers were read are those of the files that were made of them.
    """
    paths = [folder / f"made-{number}" for number in range(len(plan))]
    for path in paths:
        path.unlink(missing_ok=True)
    spec = [{transfer.name: (transfer.dtype, transfer.box.shape)} for transfer in plan]
    writers = [TensorWriter(path, names) for path, names in zip(paths, spec, strict=True)]
    seen = {piece.stored.file: Checksum() for transfer in plan for piece in transfer.pieces}
    try:
        tallies = Work(seen=seen, **options).execute(zip(plan, writers, strict=True), threads)
        for path, writer in zip(paths, writers, strict=True):
            assert writer.close().crc32 == zlib.crc32(path.read_bytes())
    finally:
        for writer in writers:
            writer.abandon()
    return [load_file(path)[transfer.name] for path, transfer in zip(paths, plan, strict=True)], tallies


def test_the_disk_fetches_a_block_while_the_one_before_it_is_made(tmp_path, monkeypatch):
    """Else each read waits for the disk: the system does not see that reads follow each other."""
    whole, calls = torch.randn(64, 8), []
    transfer, real = in_one_file(tmp_path, whole)(part=Box((0, 2), (64, 5))), os.preadv
    first = tmp_path.joinpath("0.safetensors").stat().st_size - whole.nbytes

    def read(fd, into, offset):
        calls.append(("read", (offset - first) // 32))
        return real(fd, into, offset)

    with monkeypatch.context() as watched:
        watched.setattr(os, "posix_fadvise", lambda fd, at, size, _: calls.append(((at - first) // 32, size)))
        watched.setattr(os, "preadv", read)
        executed(tmp_path, [transfer], threads=1, block=16 * 12)
    advice = 15 * 32 + 12  # from the third column of a row to the fifth of the fifteenth row after it
    assert calls == [
        (16, advice), ("read", 0), (32, advice), ("read", 16), (48, advice), ("read", 32), ("read", 48)
    ]  # fmt: skip


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -float("nan")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_look_finds_what_is_not_finite(value, dtype):
    assert (
        look_at(torch.zeros(0, dtype=dtype)) == look_at(torch.zeros(2, dtype=torch.int8)) == Look(True, True)
    )
    assert not look_at(torch.tensor([0, 1])).zero
    limits = torch.finfo(dtype)
    numbers = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.tiny, -limits.tiny, 1.0], dtype=dtype)
    assert look_at(numbers).finite and not look_at(numbers).zero
    for at in range(len(numbers)):
        bad = numbers.clone()
        bad[at] = value
        assert not look_at(bad).finite


@pytest.mark.parametrize(
    ("value", "says"), [(float("nan"), "nan at"), (float("-inf"), "-inf at")], ids=["C9-NaN", "C10-infinity"]
)
def test_what_is_not_finite_is_refused_where_it_stands(tmp_path, value, says):
    whole = torch.randn(40, 10)
    whole[33, 7] = value
    transfer = in_one_file(tmp_path, whole)
    with pytest.raises(BadInput, match=rf"0.safetensors: w: .*{says} \[33, 7\].*--allow-nonfinite"):
        executed(tmp_path, [transfer()], block=256)
    (out,), _ = executed(tmp_path, [transfer()], allow_nonfinite=True)
    assert torch.equal(out, whole) if value == value else bool(out[33, 7].isnan())


@pytest.mark.parametrize("into", FLOATS, ids=str)
@pytest.mark.parametrize("stored", FLOATS, ids=str)
@pytest.mark.parametrize("examples", [25, pytest.param(100, marks=pytest.mark.slow)])
def test_C8_C11_casts_count_every_number_that_they_make_zero_or_infinite(tmp_path, stored, into, examples):
    """And a tensor that was all zeros is named; what was infinite before is no overflow."""
    small = st.tuples(st.sampled_from([0.0, -0.0, 1.0, -1.0]), st.integers(-1074, 3))
    large = st.tuples(st.sampled_from([1.0, 1.9999999, -1.9999999]), st.integers(3, 1023))

    @settings(max_examples=examples)
    @given(
        numbers=st.lists(small, min_size=1, max_size=30) | st.lists(small | large, min_size=1, max_size=30),
        block=st.sampled_from([16, 64, 4096]),
    )
    def check(numbers, block):
        drawn = [factor * 2.0**exponent for factor, exponent in numbers]
        whole = torch.tensor(drawn, dtype=torch.float64).to(stored)
        plan = [in_one_file(tmp_path, whole)(name_of(into))]
        (out,), tallies = executed(tmp_path, plan, block=block, allow_nonfinite=True)
        expected = whole.to(into)
        assert torch.equal(out, expected)
        lost = int(((whole != 0) & (expected == 0)).sum())
        assert tallies["w"]["underflows"] == lost
        assert tallies["w"]["overflows"] == int((expected.isinf() & whole.isfinite()).sum())
        assert bool(tallies["w"]["left"]) == (stored != into and bool(expected.any()))
        assert bool(tallies["w"]["others"]) == bool(whole.any())

    check()


def test_a_change_on_the_way_is_counted_as_what_it_makes(tmp_path):
    """Merged adapters are sums in fp32, rounded to the base's type."""
    transfer = in_one_file(tmp_path, torch.ones(8, dtype=torch.float16))
    tiny = torch.tensor([1e-9] * 6 + [0.0, 1.0])

    def change(name):
        return lambda numbers, part: tiny[part.slices]

    (out,), _ = executed(tmp_path, [transfer("F32")], change=change)
    assert torch.equal(out, tiny)
    _, tallies = executed(tmp_path, [transfer("F16")], change=change)
    assert tallies["w"] == {"others": 1, "underflows": 6, "left": 1}
    tiny *= 1e-9
    _, tallies = executed(tmp_path, [transfer("F16")], change=change)
    assert tallies["w"] == {"others": 1, "underflows": 7}


@pytest.mark.parametrize(("rest", "underflows"), [(0.0, 0), (1e-30, 20)])
def test_C11_a_resumed_conversion_does_not_take_the_rest_for_all(tmp_path, rest, underflows):
    """The half of the tensor that was made before the kill has numbers that are not zero, cast or not."""
    whole = torch.cat((torch.ones(20), torch.full((20,), rest)))
    save_file({"w": whole}, tmp_path / "f")
    halves = [Box((0,), (20,)), Box((20,), (40,))]
    file = TensorFile.open(tmp_path / "f")
    cut_in_two = [Piece.plain(box, Key(file, "w"), box.start) for box in halves]

    def make(again):
        writers = [TensorWriter(tmp_path / f"{i}", {"w": ("F16", (20,))}, again=again) for i in range(2)]
        plan = [Transfer("w", piece.box, (piece,), "F16") for piece in cut_in_two]
        transfers = zip(plan, writers, strict=True)
        finished = FinishedWork(tmp_path / "journal", lambda: None, sync_interval=1)
        tally = Work(finished=finished).execute(transfers, 1)["w"]
        for writer in writers:
            writer.close()
        assert tally["others"] and tally["left"] and tally["underflows"] == underflows

    make(again=False)
    assert [*FinishedWork(tmp_path / "journal", lambda: None).done] == [0]
    make(again=True)


def test_the_first_error_ends_the_work_and_its_threads(tmp_path):
    tensors = {f"w{i}": torch.full((64,), float("nan") if i == 5 else 1.0) for i in range(200)}
    save_file(tensors, tmp_path / "f")
    box = Box((0,), (64,))
    file = TensorFile.open(tmp_path / "f")
    plan = [Transfer(name, box, tuple(in_file(file, name).pieces(box)), "F32") for name in tensors]
    with pytest.raises(BadInput, match="w5: expected finite"):
        executed(tmp_path, plan)
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")]


def test_progress_adds_up_and_memory_does_not_grow_C7(tmp_path, monkeypatch):
    whole = torch.randn(512, 1024)
    transfer = in_one_file(tmp_path, whole)
    sizes, empty = [], torch.empty

    def counted(*shape, dtype):
        out = empty(*shape, dtype=dtype)
        sizes.append(out.nbytes)
        return out

    plan = [transfer(part=box) for box in cut((512, 1024), {1: [100, 777]})]
    monkeypatch.setattr(torch, "empty", counted)
    made = []
    random.Random(0).shuffle(plan)
    executed(tmp_path, plan, threads=1, block=1 << 16, progress=made.append)
    assert sum(made) == whole.nbytes and len(made) > 30
    assert sum(sizes) <= 3 << 16
