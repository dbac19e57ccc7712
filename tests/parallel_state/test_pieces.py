"""Boxes and pieces: whatever is cut, joined or turned round, the elements are those that indexing gives."""

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from trilith.parallel_state import Box, Piece

STORED = (5, 6, 7)
NUMBERS = torch.arange(5 * 6 * 7).view(STORED)


@st.composite
def pieces(draw):
    """Draw a piece of a tensor of shape ``STORED``: dims in any order, with steps, some left out or added."""
    dims = [*draw(st.permutations(range(3)))[: draw(st.integers(1, 3))]]
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), None)
    start = [draw(st.integers(0, n - 1)) for n in STORED]
    steps = [1 if dim is None else draw(st.integers(1, 3)) for dim in dims]
    most = [
        1 if dim is None else (STORED[dim] - 1 - start[dim]) // step + 1
        for dim, step in zip(dims, steps, strict=True)
    ]
    corner = [draw(st.integers(0, 3)) for _ in dims]
    stop = [low + draw(st.integers(1, n)) for low, n in zip(corner, most, strict=True)]
    return Piece(Box(tuple(corner), tuple(stop)), "stored", tuple(start), tuple(dims), tuple(steps))


def by_index(piece, stored):
    """Return the piece's elements, one by one as its docstring says."""
    out = torch.zeros(piece.box.shape, dtype=stored.dtype)
    for index in product(*map(range, piece.box.shape)):
        at = [*piece.start]
        for i, dim, step in zip(index, piece.dims, piece.steps, strict=True):
            if dim is not None:
                at[dim] += i * step
        out[index] = stored[tuple(at)]
    return out


def boxes(shape):
    bounds = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
    return st.tuples(*bounds).map(lambda each: Box(tuple(a for a, _ in each), tuple(b for _, b in each)))


def indices(box):
    return {*product(*map(range, box.start, box.stop))} if box else set()


@given(st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes((6,) * dims), boxes((6,) * dims))))
def test_an_intersection_holds_what_both_hold(pair):
    one, other = pair
    overlap = one.intersect(other)
    assert indices(overlap) == indices(one) & indices(other) and overlap == other.intersect(one)
    assert overlap is None or overlap.size == len(indices(overlap)) > 0


@given(pieces(), st.data())
def test_a_piece_and_a_part_of_it_are_the_elements_at_their_indices(piece, data):
    whole = by_index(piece, NUMBERS)
    assert torch.equal(piece.of(NUMBERS), whole)
    assert torch.equal(piece.of(NUMBERS[piece.hull.slices].contiguous(), piece.hull.start), whole)
    box = data.draw(boxes(piece.box.stop))
    part = piece.narrow(box)
    if part is None:
        assert piece.box.intersect(box) is None
    else:
        assert torch.equal(part.of(NUMBERS), whole[part.box.within(piece.box).slices])
        assert part.box == piece.box.intersect(box)


@given(pieces(), st.data())
def test_a_piece_through_a_part_is_just_the_elements_that_the_part_holds(piece, data):
    """The part is itself any piece of a file: a box of the stored tensor, in any order, with steps."""
    held = data.draw(boxes(STORED).filter(lambda box: box.size))
    order = data.draw(st.permutations(range(3)))
    steps = tuple(data.draw(st.integers(1, 2)) for _ in range(3))
    sizes = [0] * 3
    for own, dim in enumerate(order):
        sizes[dim] = held.shape[own] * steps[own]
    file, part = torch.full(sizes, -1), Piece(held, "file", (0, 0, 0), tuple(order), steps)
    part.of(file).copy_(NUMBERS[held.slices])
    inside = torch.zeros(STORED, dtype=torch.bool)
    inside[held.slices] = True
    through = piece.through(part)
    if through is None:
        assert not by_index(piece, inside).any()
    else:
        wanted = by_index(piece, NUMBERS)[through.box.within(piece.box).slices]
        assert torch.equal(through.of(file), wanted)
        assert int(by_index(piece, inside).sum()) == through.box.size


@given(pieces().filter(lambda piece: piece.dense))
def test_a_dense_piece_turned_round_twice_is_itself(piece):
    whole = torch.zeros(piece.box.stop, dtype=NUMBERS.dtype)
    whole[piece.box.slices] = piece.of(NUMBERS)
    back = piece.reversed("whole")
    assert torch.equal(back.of(whole), NUMBERS[piece.hull.slices])
    assert back.reversed("stored").hull == piece.hull and back.hull == piece.box
