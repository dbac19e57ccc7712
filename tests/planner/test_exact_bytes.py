"""Parameters of every family are planned exactly on each rank of the parity matrix, as FSDP shards them."""

import pytest
import torch
from support.configs import EXPERTS, MODELS
from support.families import family_and_config
from support.layout_cases import axes
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.parallel_state.engine import local_data
from trilith.planner import rank_parameters
from trilith.planner.kinds_of_blocks import sampled
from trilith.testing import run_parallel
from trilith.training import Precision, shard_over_data

#: The first few are in every run, the others are slow.
LAYOUTS = [
    Layout.of(**axes(cut))
    for cut in (
        *("tp2-dp2-zero2", "pp2-dp2-zero3-v", "tp2-dp2-ep2-zero3-sp", "tp2-sp", "tp2-cp2-sp", "tp2-pp2"),
        *(f"dp2-zero{zero}" for zero in range(4)),
        *("pp2-dp2-zero1", "dp2-ep2-zero2", "cp2-ep2-zero1"),
    )
]


def count(layout):
    """Count each family's stored and trained elements on this rank: as sharded, planned from the built model,
    and planned from one block of each kind.
    """
    state = ParallelState.start(layout)
    found = {}
    for name, raw in MODELS.items():
        if layout.expert > 1 and name not in EXPERTS:
            continue
        family, config = family_and_config(raw)
        try:
            model = family.build(config, state=state, device="meta")
        except BadInput:  # too few blocks for four stages
            continue
        held = rank_parameters(model, state)
        alike = sampled(family, config, layout).parameters(state)
        plans = [(one.stored + one.buffers, one.trained_stored) for one in (held.every, alike.every)]
        shard_over_data(model, state, Precision(torch.float32, torch.float32, torch.float32))
        sizes = [(local_data(one).numel(), one.requires_grad) for one in model.parameters()]
        real = sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)
        found[name] = (real, *plans)
    return found


@pytest.mark.parametrize(
    "layout", [*LAYOUTS[:3], *(pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS[3:])], ids=str
)
def test_every_family_s_parameters_are_planned_exactly(layout):
    every = EXPERTS if layout.expert > 1 else MODELS.keys()
    for rank in run_parallel(count, layout.world, layout, timeout=240):
        assert rank.keys() == every if layout.stages < 3 else len(rank) >= 20
        assert {name: plans for name, (real, *plans) in rank.items() if {*plans} != {real}} == {}
