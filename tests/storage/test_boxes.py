"""Boxes of tensors: as runs of bytes, each element owned once, and of the views in archives of torch."""

import time
import zlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trilith.parallel_state import BadInput, Box
from trilith.storage.strides import View, blocks, contiguous, first_flaw, runs_of
from trilith.storage.torch_archive import open_state_dict


@st.composite
def tilings(draw):
    """Draw a shape and boxes that tile it; perhaps one is dropped, doubled or replaced."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=0, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        if not shape:
            break
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        boxes += [box.narrow(dim, 0, at), box.narrow(dim, at, box.shape[dim])]
    for _ in range(draw(st.integers(0, 2))):
        which = draw(st.integers(0, len(boxes) - 1)) if boxes else 0
        act = draw(st.sampled_from(["drop", "double", "random"]))
        if act == "drop" and boxes:
            boxes.pop(which)
        elif act == "double" and boxes:
            boxes.append(boxes[which])
        else:
            bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
            boxes.append(Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds)))
    return shape, boxes


@given(tilings())
def test_a_flaw_of_coverage_is_what_counting_finds(case):
    shape, boxes = case
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices] += 1
    flaw = first_flaw(Box.whole(shape), boxes)
    if (counts == 1).all():
        assert flaw is None
    else:
        assert flaw is not None and flaw.times != 1
        assert flaw.box.size and (counts[flaw.box.slices] == flaw.times).all()


def test_coverage_by_thousands_of_shards_takes_milliseconds():
    whole = Box.whole((16_384 * 4, 64))
    rows = [whole.narrow(0, i * 4, i * 4 + 4) for i in range(16_384)]
    begin = time.process_time()
    assert first_flaw(whole, rows) is None
    assert first_flaw(whole, rows[:-1]) is not None
    assert time.process_time() - begin < 2


@st.composite
def shapes_and_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


@given(
    shapes_and_boxes(),
    st.just(range(4)) | st.permutations(range(4)),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
)
def test_runs_are_the_elements_of_a_box_of_a_permuted_and_stepped_tensor(case, order, step, itemsize):
    shape, box = case
    order = [dim for dim in order if dim < len(shape)]
    base = tuple(shape[dim] * step for dim in order)
    whole = np.arange(int(np.prod(base)), dtype=f"u{itemsize}").reshape(base)
    raw = whole.tobytes()
    view = whole[(slice(None, None, step),) * len(shape)].transpose(np.argsort(order))
    strides = tuple(contiguous(base)[order.index(dim)] * step for dim in range(len(shape)))
    runs = list(runs_of(shape, box, itemsize, strides))
    starts = [(r.offset + row * r.stride, r.length) for r in runs for row in range(r.rows)]
    assert b"".join(raw[at : at + length] for at, length in starts) == view[box.slices].tobytes()
    if step == 1 and order == sorted(order):
        assert [*runs_of(shape, box, itemsize)] == runs
        # Rows and columns are one regular grid; dims that are whole never split a run.
        assert len(runs) <= np.prod(box.shape[:-2], initial=1)
        assert len(starts) == len(runs) or any(a + n < b for (a, n), (b, _) in pairwise(starts))


@given(shapes_and_boxes(), st.integers(1, 40))
def test_blocks_tile_the_box_in_order(case, most):
    _, box = case
    whole = np.arange(int(np.prod(box.stop)) if box.stop else 1).reshape(box.stop)
    pieces = list(blocks(box, most))
    together = [whole[piece.slices].ravel() for piece in pieces]
    assert np.array_equal(np.concatenate(together), whole[box.slices].ravel())
    for piece in pieces:
        assert sum(runs.rows for runs in runs_of(box.shape, piece.within(box), 2)) <= 1
    assert all(piece.size <= most for piece in pieces)


BASE = torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)
SAVED = {
    "whole": BASE,
    "slice": BASE[1:3, 2:, 1],
    "turned": BASE.permute(2, 0, 1),
    "stepped": BASE[:, ::2, :].transpose(0, 1),
    "bf16": torch.randn(3, 4).bfloat16(),
    "float8": torch.randn(3, 4).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
    "parameter": torch.nn.Parameter(torch.randn(2, 3)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "model.bin"
    torch.save({**SAVED, "step": 7, "note": "text"}, path)
    return path


def test_every_tensor_of_an_archive_is_found_with_its_bytes(saved):
    file = open_state_dict(saved)
    assert file.tensors.keys() == SAVED.keys()
    for name, wanted in SAVED.items():
        read = file.read(name)
        assert read.dtype == wanted.dtype and read.shape == wanted.shape
        assert torch.equal(
            read.view(-1).view(torch.uint8), wanted.detach().contiguous().view(-1).view(torch.uint8)
        )


@given(st.sampled_from(["whole", "slice", "turned", "stepped"]), st.data())
def test_any_box_of_any_view_is_that_of_the_tensor(saved, name, data):
    file = open_state_dict(saved)
    wanted = SAVED[name]
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in wanted.shape]
    box = Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
    assert torch.equal(file.read(name, box), wanted[box.slices])
    raw = saved.read_bytes()
    runs = b"".join(raw[at : at + length] for at, length in file.byte_ranges(name, box))
    assert runs == wanted[box.slices].contiguous().numpy().tobytes()


def test_the_stated_sums_are_those_of_the_stretches_that_hold_views(saved):
    file = open_state_dict(saved)
    raw = saved.read_bytes()
    assert len(file.sums) == len({one.untyped_storage().data_ptr() for one in SAVED.values()})
    assert all(zlib.crc32(raw[begin:end]) == crc for begin, end, crc in file.sums)
    for begin, size in ((0, 1), (file.sums[0][0], len(raw) // 4)):
        with pytest.raises(BadInput, match="expected bytes of one storage"):
            file.add(View.strided("F32", (size,), begin, (1,)))


def test_a_view_that_reads_other_numbers_than_are_stored_is_refused(tmp_path):
    negated = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert negated.is_neg()
    torch.save({"a": negated}, tmp_path / "negated")
    with pytest.raises(BadInput, match=r"resolve_neg\(\)"):
        open_state_dict(tmp_path / "negated")
    torch.save({"a": negated.resolve_neg()}, tmp_path / "plain")
    assert open_state_dict(tmp_path / "plain").read("a").tolist() == [-2.0, -4.0]
