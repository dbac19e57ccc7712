"""The ranks of a pipeline meet before its first step: each exchanges a number with each of its neighbours."""

import pytest
import torch
from trilith.parallel_state import Layout, ParallelState
from trilith.pipeline import SCHEDULE_NAMES, layout_of
from trilith.pipeline.relay import greet
from trilith.pipeline.runner import neighbours
from trilith.testing import run_parallel


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
