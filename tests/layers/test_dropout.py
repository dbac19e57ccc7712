"""Dropout masks: alike on ranks that hold the same activations, each rank's own where these are split."""

import pytest
import torch
import torch.distributed as dist
from trilith.layers import Dropout, own_random
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import run_parallel


def masks(sequence):
    """Return a block's draws: dropout of activations, a split region inside, then common numbers again."""
    state = ParallelState.start(Layout.of(tensor=dist.get_world_size(), sequence=sequence))
    torch.manual_seed(5)
    x = torch.ones(64, 64)
    found = {"between": Dropout(0.5, state=state)(x)}
    with own_random(state, split=True):
        found["heads"] = torch.rand(64)
    found["after"] = Dropout(0.5, state=state)(x)
    with own_random(state, split=True):
        found["heads again"] = torch.rand(64)
    found["generator"] = torch.get_rng_state()
    return found


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_masks_agree_exactly_where_activations_are_the_same(sequence):
    first, *others = run_parallel(masks, 4, sequence)
    assert not torch.equal(first["heads"], first["heads again"]) and not torch.equal(
        first["between"], first["after"]
    )
    for other in others:
        assert torch.equal(first["generator"], other["generator"]), "the common stream must go on alike"
        for name in ("between", "after"):
            assert torch.equal(first[name], other[name]) == (not sequence)
        for name in ("heads", "heads again"):
            assert not torch.equal(first[name], other[name])
