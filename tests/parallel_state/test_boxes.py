"""The algebra of boxes, against sets of indices."""

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from trilith.parallel_state import Box, shared_units

_bounds = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)


def boxes(dims):
    return st.lists(_bounds, min_size=dims, max_size=dims).map(
        lambda pairs: Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
    )


_pairs = st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims)))


def indices(box):
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@given(_pairs)
def test_an_intersection_holds_what_both_hold(pair):
    a, b = pair
    overlap = a.intersect(b)
    assert (indices(overlap) if overlap else set()) == indices(a) & indices(b)
    assert overlap == b.intersect(a)
    assert overlap is None or overlap.size > 0


@given(_pairs)
def test_size_shape_and_slices_count_the_same_elements(pair):
    box = pair[0]
    assert box.size == len(indices(box)) == torch.Size(box.shape).numel()
    assert torch.zeros((6,) * len(box.shape))[box.slices].shape == box.shape


@given(_pairs)
def test_within_is_the_place_in_the_outer_box(pair):
    outer = pair[0]
    inner = outer.intersect(pair[1])
    if inner is None:
        return
    whole = torch.arange(6 ** len(outer.shape)).reshape((6,) * len(outer.shape))
    assert torch.equal(whole[outer.slices][inner.within(outer).slices], whole[inner.slices])
    assert inner.within(outer).shift(outer.start) == inner


@given(boxes(3), st.integers(0, 2), st.data())
def test_narrow_counts_from_the_boxs_own_start(box, dim, data):
    length = box.shape[dim]
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    whole = torch.arange(216).reshape(6, 6, 6)
    wanted = whole[box.slices].narrow(dim, start, stop - start)
    assert torch.equal(whole[box.narrow(dim, start, stop).slices], wanted)


@given(st.integers(1, 12), st.integers(1, 8))
def test_a_rank_needs_every_unit_that_its_equal_share_touches(units, size):
    """A share consists of units cut into ``size`` pieces each: then every rank has ``units`` whole pieces."""
    for index in range(size):
        touched = {piece // size for piece in range(index * units, (index + 1) * units)}
        assert set(shared_units(units, size, index)) == touched
