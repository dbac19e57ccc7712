"""Check that a declaration fixes each rank's part: cut as ``torch.chunk`` does, one owner an element."""

from itertools import product
from math import lcm

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draws import drawn
from torch import nn
from trilith.parallel_state import (
    BadInput,
    Box,
    Cut,
    Declaration,
    Layout,
    Own,
    ParallelState,
    Piece,
    declarations,
    declare_parameter,
)

_sizes = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def layouts(draw):
    """Any layout of at most 64 ranks, with and without ZeRO, context and expert axes."""
    sizes = {}
    room = 64
    for axis in draw(st.permutations(["tensor", "context", "data_shard", "data_replicate", "pipeline"])):
        sizes[axis] = draw(_sizes.filter(lambda n, room=room: n <= room))
        room //= sizes[axis]
    return Layout(**sizes, zero=1 if sizes["data_shard"] > 1 else draw(st.integers(0, 1)))


@st.composite
def declared(draw, tensor):
    """One to three dims, cut along any or none; padded or not, at one end of the pipeline or both."""
    dims = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 9)) for _ in range(dims)]
    cut = None
    if draw(st.booleans()):
        cut = Cut(draw(st.integers(0, dims - 1)), unit=draw(st.integers(1, 3)))
        shape[cut.dim] = tensor * cut.unit * draw(st.integers(1, 4))
    multiple = draw(st.none() | st.integers(1, 9))
    if multiple and cut is not None and cut.dim == 0:  # padding makes any number of rows fit
        shape[0] = draw(st.integers(1, 20))
    return Declaration(tuple(shape), cut=cut, multiple=multiple, ends=draw(st.booleans()))


@settings(max_examples=drawn(200))
@given(layouts(), st.data())
def test_owners_cover_every_true_element_exactly_once(layout, data):
    stated = data.draw(declared(layout.tensor))
    # A parameter of both ends lies on the first and the last stage, any other on one.
    stages = [{} for _ in range(layout.pipeline)]
    for stage in (
        {0, layout.pipeline - 1} if stated.ends else {data.draw(st.integers(0, layout.pipeline - 1))}
    ):
        stages[stage]["w"] = stated
    count = torch.zeros(stated.shape, dtype=torch.int64)
    for at in layout.places():
        if "w" in stages[at.pipeline] and stated.owner(layout, at):
            count[stated.true_part(stated.shard_box(layout, at)).slices] += 1
    assert bool((count == 1).all())
    # Before the data axes shard it, too.
    places = [at for at in layout.places() if "w" in stages[at.pipeline]]
    owned = [stated.box(layout, at) for at in places if stated.owner(layout, at, sharded=False)]
    assert sum(stated.true_part(box).size for box in owned) == torch.Size(stated.shape).numel()


@settings(max_examples=drawn(200))
@given(layouts(), st.data())
def test_boxes_are_what_chunk_gives(layout, data):
    stated = data.draw(declared(layout.tensor))
    held = stated.held_shape(layout)
    whole = torch.arange(torch.Size(held).numel()).reshape(held)
    shards = layout.data_shard * layout.context if layout.zero else 1
    for at in layout.places():
        mine = whole if stated.cut is None else whole.chunk(layout.tensor, stated.cut.dim)[at.tensor]
        assert torch.equal(whole[stated.box(layout, at).slices], mine)
        pieces = mine.chunk(shards)
        index = at.data_shard * layout.context + at.context if layout.zero else 0
        shard = pieces[index] if index < len(pieces) else mine[:0]
        assert torch.equal(whole[stated.shard_box(layout, at).slices], shard)


@given(st.integers(1, 1000), st.integers(1, 200), st.integers(1, 4), st.integers(1, 12))
def test_padding_gives_every_rank_an_equal_piece_and_wastes_less_than_one_step(rows, multiple, unit, tensor):
    layout = Layout(tensor=tensor)
    stated = Declaration((rows, 2), cut=Cut(0, unit=unit), multiple=multiple)
    stated.check(layout, "weight")
    held = stated.held_shape(layout)[0]
    assert held % multiple == 0 and held % (tensor * unit) == 0
    assert rows <= held < rows + lcm(multiple, tensor * unit)
    boxes = [stated.box(layout, at) for at in layout.places()]
    assert {box.shape for box in boxes} == {(held // tensor, 2)}
    assert sum(stated.true_part(box).shape[0] for box in boxes) == rows


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 12))
def test_a_cut_is_refused_exactly_where_units_do_not_divide(units, unit, tensor):
    stated = Declaration((units * unit, 2), cut=Cut(0, unit=unit))
    layout = Layout.of(tensor=tensor)
    if units % tensor == 0:
        stated.check(layout, "weight")
        return
    with pytest.raises(BadInput) as error:
        stated.check(layout, "weight")
    assert f"tensor={tensor}" in str(error.value) and str(units) in str(error.value)
    numbers = {int(word) for word in error.value.todo.split() if word.isdigit()}
    legal = sorted((n for n in range(1, units + 1) if units % n == 0), key=lambda n: (abs(n - tensor), n))
    assert numbers == {*legal[:2]}


def test_declarations_name_every_parameter_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            state = ParallelState.alone()
            self.first, self.second, self.plain = nn.Module(), nn.Module(), nn.Linear(3, 2, bias=False)
            declare_parameter(self.first, "weight", Declaration((3, 3), cut=Cut(0), multiple=4), state)
            self.second.weight = self.first.weight

    found = declarations(Tied())
    assert found == {
        "first.weight": Declaration((3, 3), cut=Cut(0), multiple=4),
        "plain.weight": Declaration((2, 3), initial=Own()),
    }


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
