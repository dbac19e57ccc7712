"""Check that a declaration fixes each rank's part: cut as ``torch.chunk`` does, one owner an element."""

from math import lcm

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draws import drawn
from torch import nn
from trilith.parallel_state import (
    BadInput,
    Cut,
    Declaration,
    Layout,
    Own,
    ParallelState,
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
