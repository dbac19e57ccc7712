"""Timetables of torch's own schedules: whole, possible, as idle as the formula says; neighbours and cuts.

What a pipeline rank holds in a step is what one counts by hand, however many micro-batches.
"""

from itertools import combinations, pairwise
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import Refused, refusals
from torch.distributed.pipelining.schedules import get_schedule_class
from trilith.parallel_state import Layout, ParallelState
from trilith.pipeline import SCHEDULE_NAMES, bubble, check_schedule, layout_of, schedule_kind, timetable
from trilith.pipeline.driver import neighbours
from trilith.pipeline.held_in_step import HeldInStep, _states, _with_messages
from trilith.pipeline.relay import greet
from trilith.pipeline.schedule_actions import actions
from trilith.pipeline.timetable import most_held
from trilith.testing import run_parallel
from trilith.training.stage_cut import cut_by_cost, stage_costs

#: One stage a rank: torch does not state what it runs (``Schedule1F1B`` orders its last rank otherwise).
STATED = ("interleaved", "interleaved-zero-bubble", "zbv", "dualpipev")


def order_of_torch(name, layout, micro_batches):
    """Return what torch's class states: each rank's actions in order; ``+`` if the next one goes with it."""
    seats = [
        SimpleNamespace(
            stage_index=number, num_stages=layout.stages, group_size=layout.pipeline, group_rank=0,
            is_first=number == 0, is_last=number == layout.stages - 1, submod=None, has_backward=True,
        )
        for number in layout.stages_of(0)
    ]  # fmt: skip
    order = get_schedule_class(schedule_kind(name).torch_name)(seats, micro_batches).pipeline_order
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    found = []
    for rank in range(layout.pipeline):
        texts = []
        for one in filter(None, order[rank]):
            parts = one.sub_actions or (one,)
            texts += [
                f"{letters[a.computation_type.name]} {a.stage_index} {a.microbatch_index}+" for a in parts
            ]
            texts[-1] = texts[-1].removesuffix("+")
        found.append(texts)
    return found


@pytest.mark.parametrize("name", STATED)
@pytest.mark.parametrize("pipeline", [2, 3, 4, 5, 8])
def test_the_order_is_torch_s(name, pipeline):
    compared = 0
    for virtual in (2, 3, 4) if name.startswith("interleaved") else (2,):
        layout = layout_of(name, pipeline, virtual)
        for micro_batches in range(1, 3 * pipeline + 2):
            if not schedule_kind(name).runs(pipeline, micro_batches):
                continue
            ours = actions(name, pipeline, virtual, layout.v_shape, micro_batches)
            texts = [[f"{a.kind} {a.stage} {a.micro_batch}{'+' * a.paired}" for a in rank] for rank in ours]
            assert texts == order_of_torch(name, layout, micro_batches)
            compared += 1
    assert compared > 2


SIZES = [(2, 4), (2, 8), (4, 8), (4, 20), (8, 16)]
#: Of any number of micro-batches, as one stage a rank takes them.
UNEVEN = [("gpipe", None, 3, 7), ("1f1b", None, 3, 7), ("1f1b", None, 5, 32)]
KINDS = [*((name, None) for name in SCHEDULE_NAMES), ("interleaved", 3), ("interleaved-zero-bubble", 4)]


@pytest.mark.parametrize(
    ("name", "virtual", "pipeline", "micro_batches"),
    [*((*kind, *sizes) for kind in KINDS for sizes in SIZES), *UNEVEN],
)
def test_the_bubble_is_the_formula_s(name, virtual, pipeline, micro_batches):
    layout = layout_of(name, pipeline, virtual)
    table = timetable(name, layout, micro_batches)
    assert table.bubble == pytest.approx(bubble(name, layout, micro_batches), abs=1e-12)


def test_what_ranks_hold():
    def held(name, micro_batches=8):
        found = timetable(name, layout_of(name, 4), micro_batches)
        return [found.most_held(rank) for rank in range(4)]

    assert held("gpipe") == [8, 8, 8, 8]
    assert held("1f1b") == [4, 3, 2, 1]
    # Of stages half as large: Narayanan et al.'s (p - 1) more in flight, and ZBV's even 2 p of halves.
    assert held("interleaved") == held("interleaved", 40) == [11, 9, 7, 5]
    assert held("zbv") == [8, 8, 8, 7]
    assert held("dualpipev") == [9, 9, 9, 9]
    assert timetable("1f1b", Layout(), 8).most_held(0) == 1


SEVERAL = {"pipeline": 4, "virtual_stages": 2}
REFUSED = {
    "E12-few": ("1f1b", {"pipeline": 4}, 3, "at least 4.*found 3.*a step: 4"),
    "E12-dualpipev": ("dualpipev", {**SEVERAL, "v_shape": True}, 6, "at least 8.*found 6.*a step: 8"),
    "E12-rounds": ("interleaved", SEVERAL, 9, "a multiple of 2.*found 9.*a step: 8 or 10"),
    # Only a few numbers around it are tried.
    "E12-a-trillion": ("interleaved", SEVERAL, 10**12 + 1, f"found {10**12 + 1}.*: {10**12} or {10**12 + 4}"),
    "E5-one-stage": ("interleaved", {"pipeline": 4}, 8, "at least 2.*found 1"),
    "E5-two-stages": ("1f1b", SEVERAL, 8, "1 with 1f1b.*found 2"),
    "E5-three-stages": ("zbv", {"pipeline": 4, "virtual_stages": 3}, 8, "2 with zbv.*found 3"),
    "unknown": ("1f2b", {"pipeline": 4}, 8, "one of gpipe, 1f1b.*'1f2b'"),
}
test_a_schedule_that_a_layout_cannot_run_is_refused = refusals(
    Refused(why, lambda _, name=name, layout=layout, n=n: check_schedule(name, Layout.of(**layout), n), says)
    for why, (name, layout, n, says) in REFUSED.items()
)


COST = st.integers(1, 9).map(float)


@given(st.lists(COST, min_size=1, max_size=9), st.integers(1, 5), st.integers(0, 12), st.integers(0, 12))
def test_no_cut_has_a_faster_slowest_stage(blocks, stages, first, last):
    if stages > len(blocks):
        return
    blocks[0] += first
    blocks[-1] += last
    found = cut_by_cost(blocks, stages)
    assert len(found) == stages and sum(found) == len(blocks) and min(found) >= 1
    every = []
    for places in combinations(range(1, len(blocks)), stages - 1):
        bounds = (0, *places, len(blocks))
        counts = [b - a for a, b in pairwise(bounds)]
        costs = stage_costs(counts, blocks)
        every.append((max(costs), sum(cost**2 for cost in costs)))
    costs = stage_costs(found, blocks)
    assert max(costs) == pytest.approx(min(worst for worst, _ in every))
    assert sum(cost**2 for cost in costs) == pytest.approx(min(every)[1])


def test_the_head_takes_the_place_of_blocks():
    assert cut_by_cost([1.0] * 8, 4) == [2, 2, 2, 2]
    assert cut_by_cost([1.0] * 7 + [3.0], 4) == [2, 2, 3, 1]
    assert cut_by_cost([1.01] + [1.0] * 14 + [5.0], 4) == [5, 5, 5, 1]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_neighbours_are_those_with_whom_a_schedule_exchanges_tensors(name):
    layout = layout_of(name, 4)
    near = [neighbours(ParallelState.stand_in(layout, rank)) for rank in range(4)]
    pairs = {tuple(map(layout.rank_of_stage, (n, n + 1))) for n in range(layout.stages - 1)}
    between = {frozenset(pair) for pair in pairs if len(set(pair)) > 1}
    assert {frozenset((rank, peer)) for rank in range(4) for peer in near[rank]} == between
    assert all(rank in near[peer] for rank in range(4) for peer in near[rank])


def meet(layouts):
    for layout in layouts:
        state = ParallelState.start(layout)
        greet(neighbours(state), state.pipeline.group, torch.device("cpu"))


def test_ranks_in_a_line_and_in_a_circle_meet():
    run_parallel(meet, 4, [Layout.of(pipeline=4), layout_of("interleaved", 4), layout_of("zbv", 4)])


@pytest.mark.parametrize("name", STATED)
@pytest.mark.parametrize("seed", range(6))
def test_few_micro_batches_and_what_further_ones_send_are_the_whole_step(name, seed):
    draw = Random(seed)
    pipeline, rounds = draw.choice([2, 3, 4, 8, 9]), draw.choice([2, 4, 5, 8])
    own = draw.choice([2, 3, 4]) if name.startswith("interleaved") else 2
    layout = Layout.of(pipeline=pipeline, virtual_stages=own, v_shape=layout_of(name, 4).v_shape)
    # An interleaved schedule's rounds may have more micro-batches than the pipeline has ranks.
    odd = (
        draw.choice([0, rounds * (rounds < pipeline)])
        if name.startswith("interleaved")
        else draw.randrange(pipeline)
    )
    shape = name, pipeline, own, layout.v_shape, rounds * pipeline + odd
    for rank in range(pipeline):
        whole = [draw.uniform(0, 100) for _ in range(own)]
        halfway = [draw.uniform(-20, 60) for _ in range(own)]
        message = draw.choice([0.0, 1.0, 5.0])
        weights = [*whole, *halfway, message, 0.0]
        every = {}
        for key, row in _states(_with_messages(*shape)[rank], layout, rank):
            if key[0] != "F" or key[1] == layout.stages - 1 or (layout.v_shape and key[1] == 0):
                every.setdefault(key, set()).add(row)
        expected = {
            key: max(sum(a * b for a, b in zip(row, weights, strict=True)) for row in rows)
            for key, rows in every.items()
        }
        instants = HeldInStep(name, layout, shape[-1], rank, whole, halfway, message).heaviest
        assert {(at.kind, at.stage, at.absent): at.bytes for at in instants} == pytest.approx(
            {
                (kind, stage, absent): held
                for (kind, stage, absent), held in expected.items()
                if not absent or held > expected.get((kind, stage, ()), -1.0)
            }
        )


@pytest.mark.parametrize("name", STATED)
def test_the_micro_batches_at_the_worst_instant_are_those_of_the_timetable(name):
    """Without messages, the most that is held is counted action by action (``most_held``)."""
    layout = layout_of(name, 4)
    ranks = actions(name, layout.pipeline, layout.virtual_stages, layout.v_shape, 16)
    for rank in range(4):
        whole, halfway = most_held(ranks[rank])
        found = HeldInStep(name, layout, 16, rank, [2.0, 2.0], [1.0, 1.0], 0.0).heaviest
        assert max(one.bytes for one in found) == 2 * whole + halfway
        assert schedule_kind(name).two_backwards or all(one.kind != "W" for one in found)


def test_1f1b_and_gpipe_by_hand():
    """The first of four ranks holds four micro-batches with 1F1B, and the gradient that it receives."""
    layout = Layout.of(pipeline=4)
    (first,) = HeldInStep("1f1b", layout, 8, 0, [10.0], [0.0], 1.0).heaviest
    assert (first.kind, first.stage, first.messages, first.bytes) == ("B", 0, 2, 42)
    last = {
        instant.kind: instant for instant in HeldInStep("1f1b", layout, 8, 3, [10.0], [0.0], 1.0).heaviest
    }
    assert {kind: one.bytes for kind, one in last.items()} == {"B": 11, "F": 11}
    every = HeldInStep("gpipe", layout, 8, 1, [10.0], [0.0], 1.0).heaviest
    assert [(one.bytes, one.absent) for one in every] == [(81, (0,)), (72, ())]


def test_gradients_are_absent_until_a_stage_has_had_a_backward():
    """With few micro-batches all forwards come before the first backward."""
    for name in ("gpipe", "1f1b"):
        first = HeldInStep(name, Layout.of(pipeline=4), 4, 0, [10.0], [0.0], 1.0).heaviest
        assert [(one.bytes, one.absent) for one in first] == [(41, (0,)), (31, ())]
    for micro_batches, backwards in ((1, [(0,)]), (2, [(0,), ()])):
        alone = HeldInStep("1f1b", Layout(), micro_batches, 0, [10.0], [0.0], 0.0).heaviest
        expected = [*(("B", absent) for absent in backwards), ("F", backwards[-1])]
        assert [(one.kind, one.absent) for one in alone] == expected
    layout = Layout.of(pipeline=2, virtual_stages=2)
    few = HeldInStep("interleaved", layout, 2, 0, [10.0, 10.0], [0.0, 0.0], 1.0).heaviest
    absent_at = [(one.stage, one.absent) for one in few]
    assert absent_at == [(2, (0, 1)), (2, (0,)), (0, (0,)), (0, ())] and few[0].bytes == 41
