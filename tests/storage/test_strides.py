"""Boxes as runs of bytes, against numpy's slicing."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from trilith.parallel_state import Box
from trilith.storage.strides import blocks, contiguous, runs_of


@st.composite
def shapes_and_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


@given(shapes_and_boxes(), st.sampled_from([1, 2, 4]))
def test_runs_are_the_elements_of_the_box_in_order(case, itemsize):
    shape, box = case
    whole = np.arange(int(np.prod(shape)), dtype=f"u{itemsize}").reshape(shape)
    raw = whole.tobytes()
    runs = list(runs_of(shape, box, itemsize))
    starts = [(r.offset + row * r.stride, r.length) for r in runs for row in range(r.rows)]
    assert b"".join(raw[at : at + length] for at, length in starts) == whole[box.slices].tobytes()
    assert len(starts) == len(runs) or any(a + n < b for (a, n), (b, _) in pairwise(starts))
    # dims that are whole never split a run
    if len(shape) == 2:
        assert len(runs) <= 1


@given(shapes_and_boxes(), st.permutations(range(4)), st.integers(1, 3))
def test_runs_of_a_permuted_and_stepped_tensor_are_its_elements(case, order, step):
    shape, box = case
    order = [dim for dim in order if dim < len(shape)]
    base = tuple(shape[dim] * step for dim in order)
    whole = np.arange(int(np.prod(base)), dtype="u2").reshape(base)
    raw = whole.tobytes()
    view = whole[(slice(None, None, step),) * len(shape)].transpose(np.argsort(order))
    strides = tuple(contiguous(base)[order.index(dim)] * step for dim in range(len(shape)))
    runs = runs_of(shape, box, 2, strides)
    starts = [(r.offset + row * r.stride, r.length) for r in runs for row in range(r.rows)]
    assert b"".join(raw[at : at + length] for at, length in starts) == view[box.slices].tobytes()


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


def test_a_column_box_is_one_regular_grid():
    (runs,) = runs_of((100, 64), Box((0, 16), (100, 32)), 2)
    assert (runs.offset, runs.rows, runs.stride, runs.length) == (32, 100, 128, 32)
    (runs,) = runs_of((8, 100, 64), Box((3, 0, 16), (4, 100, 32)), 2)
    assert (runs.rows, runs.stride, runs.length) == (100, 128, 32)
