"""A layout seen from one rank: without processes as a stand-in, with them as coordinates, mesh and groups."""

import copy
import re
from contextlib import suppress
from importlib.metadata import requires
from operator import attrgetter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import Refused, refusals
from torch.distributed.device_mesh import DeviceMesh
from trilith.layers import RMSNorm
from trilith.parallel_state import (
    AXES,
    BadInput,
    Coordinates,
    Layout,
    ParallelState,
    engine,
    rank_at_fault,
    together,
)
from trilith.parallel_state.engine.supported_torch import BEFORE, SINCE
from trilith.parallel_state.state import Axis, fsdp_mesh
from trilith.testing import RankError, run_parallel


def test_another_torch_than_the_packages_range_is_refused():
    (pinned,) = (need for need in requires("trilith") if need.startswith("torch"))
    since, before = (".".join(map(str, version)) for version in (SINCE, BEFORE))
    assert {*pinned.removeprefix("torch").split(",")} == {f">={since}", f"<{before}"}
    for version in ("2.10.1", f"{before}.0", "3.0"):
        with pytest.raises(ImportError, match=rf"torch {version}: trilith needs torch 2\.11 to 2\.15"):
            engine.supported_torch.require_supported(version)


def test_a_copy_of_a_model_lies_on_the_same_ranks():
    state = ParallelState.stand_in(Layout(tensor=2))
    assert copy.deepcopy(RMSNorm(4, state=state)).state is state


def test_a_stand_in_has_coordinates_and_groups_in_which_no_number_is_sent():
    state = ParallelState.stand_in(Layout.of(tensor=2, pipeline=2, data=2), rank=5)
    assert (state.tensor.index, state.at.pipeline, state.data_index) == (1, 1, 0)
    assert state.tensor_mesh is None
    with pytest.raises(AssertionError, match="stand-in"):
        _ = state.pipeline.group
    assert (state.tensor.group.size(), state.tensor.group.rank()) == (2, 1)
    with pytest.raises(RuntimeError, match="stand-in: tensor"):
        engine.all_reduce(torch.ones(2), state.tensor.group)
    assert engine.all_reduce(torch.ones(2, device="meta"), state.tensor.group).shape == (2,)


def test_sequence_parallelism_on_one_tensor_rank_is_off_E8():
    assert not ParallelState.stand_in(Layout.of(data=2, sequence=True)).sequence
    assert ParallelState.stand_in(Layout.of(tensor=2, sequence=True)).sequence


def groups(layout):
    state = ParallelState.start(layout)
    found = {
        "tensor": dist.get_process_group_ranks(state.tensor.group),
        "pipeline": dist.get_process_group_ranks(state.pipeline.group),
        "data_shard": dist.get_process_group_ranks(fsdp_mesh(state).get_group("fsdp")),
        "data": sorted(state.data_mesh.mesh.flatten().tolist()),
    }
    if fsdp_mesh(state).ndim == 2:
        found["data_replicate"] = dist.get_process_group_ranks(fsdp_mesh(state).get_group("data_replicate"))
    if (replicas := state.replica_group()) is not None:
        found["data_replicate"] = dist.get_process_group_ranks(replicas)
    if layout.pipeline > 1:
        found["ends"] = dist.get_process_group_ranks(state.ends.group)
    if layout.context > 1:
        found["context"] = dist.get_process_group_ranks(state.context.group)
    return found


def axes_that_share_a_group(layout):
    state = ParallelState.start(layout)
    assert state.mesh is not None
    groups = {axis: state.mesh.get_group(axis) for axis in state.mesh.mesh_dim_names or ()}
    return {one for one in groups for other in groups if one != other and groups[one] is groups[other]}


def test_axes_of_one_rank_share_one_group_and_no_others_do():
    """Each group has sockets, and threads that wake up a hundred times a second."""
    for shared in run_parallel(axes_that_share_a_group, 2, Layout.of(tensor=2)):
        assert shared == {"pipeline", "data_replicate", "fsdp"}
    for shared in run_parallel(axes_that_share_a_group, 4, Layout.of(tensor=2, pipeline=2)):
        assert shared == {"data_replicate", "fsdp"}


def cuts_of_the_mesh(layout):
    """Return how often the mesh is cut when every group of the state has been asked for once more."""
    state, cut = ParallelState.start(layout), DeviceMesh.__getitem__
    of_axes = [f"{name}.group" for name, value in vars(state).items() if isinstance(value, Axis)]
    groups = of_axes + [name for name in dir(state) if re.fullmatch(r"[a-z]\w*_(group|mesh)", name)]
    counted = []
    with mock.patch.object(DeviceMesh, "__getitem__", lambda *given: counted.append(given) or cut(*given)):
        for _ in range(2):
            before = len(counted)
            for name in groups:
                with suppress(AssertionError):  # a layout without such a group
                    attrgetter(name)(state)
    return len(counted) - before, groups


def test_asking_for_a_group_does_not_cut_the_mesh_anew():
    for cuts, groups in run_parallel(cuts_of_the_mesh, 4, Layout.of(pipeline=2, data=2, expert=2, zero=1)):
        assert cuts == 0 and {"pipeline.group", "data_mesh", "expert.group"} <= {*groups}


def ranks_along(layout, axes, rank):
    others = [axis for axis in AXES if axis not in axes]
    wanted, *places = (
        [getattr(at, axis) for axis in others] for at in (layout.coordinates(rank), *layout.places())
    )
    return [number for number, at in enumerate(places) if at == wanted]


@pytest.mark.parametrize(
    "layout",
    [
        Layout.of(tensor=2, pipeline=2),
        Layout.of(tensor=2, data=2, zero=1),
        Layout.of(data=4, zero=2, data_replicate=2),
        Layout.of(pipeline=2, data=2),
        Layout.of(context=2, tensor=2),
        Layout.of(context=2, data=2),
        Layout.of(context=2, data=2, zero=3),
    ],
    ids=str,
)
def test_process_groups_are_the_ranks_along_their_axes(layout):
    for rank, found in enumerate(run_parallel(groups, 4, layout)):
        assert ("data_replicate" in found) == (layout.data_sizes()[0] > 1)
        ends = found.pop("ends", None)
        # FSDP shards over the context ranks too, or has them for replicas.
        joined = "data_shard" if layout.zero else "data_replicate"
        axes = {axis: (axis, "context") if axis == joined else (axis,) for axis in found}
        axes["data"] = ("data_shard", "data_replicate", "context")
        assert found == {axis: ranks_along(layout, axes[axis], rank) for axis in found}
        if ends is not None:
            along = ranks_along(layout, ("pipeline",), rank)
            assert ends == [along[0], along[-1]]


def test_every_rank_refuses_a_world_of_another_size():  # E10
    with pytest.raises(RankError) as error:
        run_parallel(groups, 2, Layout.of(tensor=4))
    assert [type(failure.cause) for failure in error.value.failures] == [BadInput, BadInput]


class Stubborn(Exception):
    """Define an error that pickle cannot rebuild: it takes two arguments and keeps one."""

    def __init__(self, what, whose):
        super().__init__(what)


def outcome_of(failing):
    state = ParallelState.start(Layout.of(data=3))
    rank = state.rank

    def work():
        error = failing.get(rank)
        if error == "stubborn":
            raise Stubborn("no", object())
        if isinstance(error, Exception):
            raise error
        return rank

    try:
        return str(together(work, state)), "", -1
    except Exception as error:
        return type(error).__name__, str(error), rank_at_fault(error, default=rank)


def test_all_have_the_results_or_the_error_of_the_lowest_rank():
    assert run_parallel(outcome_of, 3, {}) == [("[0, 1, 2]", "", -1)] * 3
    bad = BadInput("here", "key", expected="one", found="two")
    assert run_parallel(outcome_of, 3, {1: bad, 2: ValueError("later")}) == [("BadInput", str(bad), 1)] * 3


def test_an_error_that_cannot_travel_is_told_in_words():
    """Otherwise the exchange itself would fail on one rank while the others wait."""
    assert run_parallel(outcome_of, 3, {2: "stubborn"}) == [("RuntimeError", "Stubborn: no", 2)] * 3


_size = st.integers(1, 4)


@st.composite
def layouts(draw):
    sizes = {axis: draw(_size) for axis in ("tensor", "context", "data_shard", "data_replicate", "pipeline")}
    return Layout(**sizes, zero=1 if sizes["data_shard"] > 1 else draw(st.integers(0, 3)))


@given(layouts())
def test_a_stage_s_first_rank_is_the_first_with_its_coordinate(layout):
    for stage in range(layout.pipeline):
        ranks = (rank for rank, at in enumerate(layout.places()) if at.pipeline == stage)
        assert layout.first_rank(stage) == next(ranks)


@given(layouts())
def test_coordinates_and_ranks_are_a_bijection(layout):
    places = list(layout.places())
    assert len(set(places)) == len(places) == layout.world
    assert [layout.rank(at) for at in places] == list(range(layout.world))


def test_tensor_is_the_fastest_axis_and_pipeline_the_slowest():
    layout = Layout(tensor=2, context=2, data_shard=2, data_replicate=2, pipeline=2, zero=1)
    steps = {axis: layout.rank(Coordinates(**{axis: 1})) for axis in AXES}
    assert steps == {"tensor": 1, "context": 2, "data_shard": 4, "data_replicate": 8, "pipeline": 16}
    assert layout.world == 32 and layout.data == 4
    layout.check_world(32)


@pytest.mark.parametrize(
    ("asked", "shard", "replicate"),
    [
        ({"data": 4}, 1, 4),
        ({"data": 4, "zero": 1}, 4, 1),
        ({"data": 4, "zero": 2, "data_replicate": 2}, 2, 2),
        ({"data": 4, "zero": 0, "data_replicate": 4}, 1, 4),
    ],
)
def test_data_ranks_are_replicas_without_zero_and_shards_with_it(asked, shard, replicate):
    layout = Layout.of(**asked)
    assert (layout.data_shard, layout.data_replicate, layout.data) == (shard, replicate, 4)


REFUSED = {
    "E11-zero": (lambda: Layout(tensor=0), "tensor: expected .*from 1 up"),
    "E11-negative": (lambda: Layout(pipeline=-2), "pipeline: expected .*from 1 up"),
    "E11-bool": (lambda: Layout(tensor=True), "tensor: expected .*whole number"),
    "E11-sequence": (lambda: Layout(sequence=1), "sequence: expected true or false"),
    "E14-four": (lambda: Layout(zero=4), "zero: expected .*0, 1, 2 or 3"),
    "E14-shards-at-stage-0": (lambda: Layout(data_shard=2), "zero: expected .*data_shard=2"),
    "E11-replicas": (lambda: Layout.of(data=3, zero=1, data_replicate=2), "data_replicate: expected .*3"),
    "E11-no-replica": (lambda: Layout.of(data=2, zero=1, data_replicate=0), "data_replicate: expected .*2"),
    "E11-expert": (lambda: Layout(context=2, expert=3), "expert: expected .*= 2"),
    "E11-virtual": (lambda: Layout(virtual_stages=2), "virtual_stages: expected 1 with pipeline=1, found 2"),
    "E10-rank": (lambda: Layout.of(tensor=2).coordinates(2), "rank: expected .*0 to 1"),
    **{
        f"E10-{why}": (
            lambda world=world: Layout.of(tensor=2, pipeline=2).check_world(world),
            rf"expected 4 ranks = tensor 2 x pipeline 2, found {world} started\. {todo}, or start 4 ranks",
        )
        for why, world, todo in (
            *(("fewer", 1, "Change an axis"), ("uneven", 3, "Change an axis")),
            ("more", 8, "Say layout.data=2"),
        )
    },
}
test_a_number_that_cannot_be_is_refused_with_what_was_expected = refusals(
    [Refused(why, lambda _, call=call: call(), says) for why, (call, says) in REFUSED.items()]
)


def test_expert_is_no_factor_of_the_world():
    assert Layout(context=2, data_shard=2, expert=4, zero=1).world == 4


@pytest.mark.parametrize(
    ("layout", "length", "expected", "nearest"),
    [
        (Layout.of(context=2), 10, "2 x context=2", "8 or 12"),
        (Layout.of(context=4), 5, "2 x context=4", "8"),
        (Layout.of(tensor=2, sequence=True), 7, "tensor=2 under sequence parallelism", "6 or 8"),
        (
            Layout.of(context=2, tensor=3, sequence=True),
            16,
            "2 x context=2 and tensor=3 under sequence parallelism",
            "12 or 24",
        ),
    ],
    ids=["E7-two", "E7-too-short", "E9-sequence", "E7-and-sequence"],
)
def test_a_length_that_cannot_be_cut_is_refused_with_the_nearest_that_can(layout, length, expected, nearest):
    with pytest.raises(BadInput) as error:
        layout.check_length(length, "recipe", "data.sequence_length")
    assert str(error.value) == (
        f"recipe: data.sequence_length: expected a multiple of {expected}, found {length}. "
        f"Nearest legal data.sequence_length: {nearest}"
    )
    for legal in map(int, nearest.split(" or ")):
        layout.check_length(legal, "recipe", "data.sequence_length")


def test_a_layout_reads_as_its_unusual_numbers():
    assert str(Layout()) == "one rank"
    assert str(Layout.of(tensor=2, data=2, zero=1)) == "tensor 2, data 2, zero 1"
    hybrid = Layout.of(data=4, zero=2, data_replicate=2, tensor=2, sequence=True)
    assert str(hybrid) == "tensor 2, data 4, data_replicate 2, zero 2, sequence true"
    assert str(Layout.of(data=2)) == "data 2"
