"""A grid says by rule what each rank stores: equal to the declarations, never expanded, else refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.draws import drawn
from support.refusals import Refused, refusals
from trilith.checkpoints.stored_tensor import Grid
from trilith.parallel_state import Box, Cut, Declaration, Layout

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw):
    """Any layout of at most 256 ranks, with and without ZeRO, context and expert axes."""
    sizes = {axis: draw(SIZES) for axis in ("tensor", "context", "data_shard", "data_replicate", "pipeline")}
    if draw(st.booleans()):
        sizes["data_shard"] = 1
    pool = sizes["context"] * sizes["data_shard"]
    zero = 1 if sizes["data_shard"] > 1 else draw(st.integers(0, 1))
    pool *= 1 if zero else sizes["data_replicate"]
    return Layout(
        **sizes, zero=zero, expert=draw(st.sampled_from([n for n in (1, 2, 3, 4) if pool % n == 0]))
    )


@st.composite
def declared(draw, layout):
    """One to three dims, cut along any or none; padded, stacked experts, buffers, at one end or both."""
    dims = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 13)) for _ in range(dims)]
    experts = layout.expert > 1 and dims > 1 and draw(st.booleans())
    if experts:
        shape[0] = layout.expert * draw(st.integers(1, 4))
    cut = None
    if draw(st.booleans()):
        cut = Cut(draw(st.integers(int(experts), dims - 1)))
        shape[cut.dim] = layout.tensor * draw(st.integers(1, 5))
    multiple = None if experts else draw(st.none() | st.integers(1, 9))
    if multiple and cut is not None and cut.dim == 0:  # padding makes any number of rows fit
        shape[0] = draw(st.integers(1, 30))
    return Declaration(
        tuple(shape),
        cut=cut,
        multiple=multiple,
        experts=experts,
        ends=draw(st.booleans()),
        buffer=not experts and cut is None and multiple is None and draw(st.booleans()),
    )


@settings(max_examples=drawn(200))
@given(st.data())
def test_a_grid_gives_each_rank_the_box_that_it_stores_and_owns(data):
    layout = data.draw(layouts())
    stated = data.draw(declared(layout))
    pipeline = 0 if stated.ends else data.draw(st.integers(0, layout.pipeline - 1))
    grid = Grid.of(stated, layout, pipeline)
    stored = {}
    for rank, at in enumerate(layout.places()):
        box = stated.true_part(stated.shard_box(layout, at))
        owns = at.pipeline == pipeline and stated.owner(layout, at) and bool(box.size)
        assert grid.box_of(rank, stated.shape) == (box if owns else None)
        if owns:
            stored[rank] = box
    assert dict(grid.parts(stated.shape)) == stored
    assert grid.number(stated.shape) == len(stored)
    grid.check("manifest", "w", stated.shape, stored)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in stated.shape)
    within = Box(
        start, tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, stated.shape, strict=True))
    )
    near = {rank: box for rank, box in stored.items() if box.intersect(within) is not None}
    assert dict(grid.parts(stated.shape, within)) == near


def test_a_scalar_and_a_tensor_without_elements_need_no_cuts():
    scalar = Grid(first=3)
    assert [*scalar.parts(())] == [(3, Box((), ()))] and scalar.number(()) == 1
    assert scalar.box_of(3, ()) == Box((), ()) and scalar.box_of(2, ()) is None
    assert [*scalar.parts((0, 2))] == [] and scalar.number((0, 2)) == 0


def cut(**changes):
    return {"dim": 0, "rows": 2, "count": 4, "apart": 1} | changes


def refused(why, cuts, says, shape=(8,)):
    grid = Grid.model_validate({"first": 0, "cuts": tuple(cuts)})
    return Refused(why, lambda folder: grid.check("manifest.json", "w", shape, range(4)), says, code=4)


MANY_EACH = [cut(dim=dim, rows=1, count=10**6, apart=10 ** (6 * dim)) for dim in range(3)]
MOST = "at most 4 parts, one a file, found 1,000,000,000,000"
test_a_grid_that_cannot_be_is_refused_in_one_line = refusals(
    refused("a part missing", [cut(count=3)], r"dim 0, 6:8 owned by nobody"),
    refused("rows missing", [cut(rows=1)], r"dim 0, 4:8 owned by nobody"),
    refused("rows missing within", [cut(), cut(rows=1, count=1, apart=4)], r"1:2 owned by nobody"),
    refused("no such dim", [cut(dim=1)], r"cuts of \[8\], found one of dim 1"),
    refused("two parts in a file", [cut(), cut(rows=1, count=2, apart=3)], "one part in each file"),
    refused("a file missing", [cut(apart=2)], "none of rank 4"),
    refused("more parts than files", [cut(rows=1, count=8)], "at most 4 parts, one a file, found 8"),
    # Parts without number, which are never written out.
    refused("countless", [cut(rows=1, count=10**18)], MOST, (10**18,)),
    refused("countless in three dims", MANY_EACH, MOST, (10**6,) * 3),
    refused("countless within others", [cut(rows=10**6, count=10**6), cut(rows=1, count=10**6, apart=10**6)],
            MOST, (10**12,)),
)  # fmt: skip


@pytest.mark.parametrize("changes", [{"rows": 0}, {"count": 0}, {"apart": 0}, {"dim": -1}, {"rows": -2}])
def test_no_number_of_a_cut_is_negative_or_nothing(changes):
    with pytest.raises(ValidationError):
        Grid.model_validate({"first": 0, "cuts": (cut(**changes),)})
