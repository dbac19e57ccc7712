"""The update is torch's AdamW bit for bit, computed on what each rank stores, without DTensor's dispatch."""

from contextlib import nullcontext

import pytest
import torch
from support.short_runs import built
from torch.distributed.tensor import DTensor
from trilith.parallel_state import Layout, ParallelState
from trilith.parallel_state.engine import TorchDispatchMode, local_data
from trilith.testing import run_parallel
from trilith.testing.operators import tensors_in
from trilith.training import Precision, make_adamw


class Updates(TorchDispatchMode):
    """Record the types of the tensors that the optimizer's kernels are given."""

    def __init__(self):
        super().__init__()
        self.given = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.given |= {type(tensor) for tensor in tensors_in(args)}
        return func(*args, **(kwargs or {}))


def both(layout, fused):
    """Update two equal models, one with torch's AdamW; return what the kernels of ours were given."""
    state = ParallelState.start(layout)
    double = Precision(torch.float64, torch.float64, torch.float64)
    ours, theirs = built(layout, double), built(layout, double)
    mine = make_adamw(ours, lr=1e-2, fused=fused)
    groups = [part | {"params": []} for part in mine.param_groups]
    other = dict(ours.named_parameters())
    names = {parameter: name for name, parameter in other.items()}
    partner = dict(theirs.named_parameters())
    for mine_part, part in zip(mine.param_groups, groups, strict=True):
        part["params"] = [partner[names[parameter]] for parameter in mine_part["params"]]
    torchs = torch.optim.AdamW(groups, lr=1e-2, fused=fused)
    seen = Updates()
    for step in range(2):
        for name, parameter in other.items():
            noise = torch.randn_like(local_data(parameter))
            for one in (parameter, partner[name]):
                one.grad = torch.zeros_like(one)
                local_data(one.grad).copy_(noise)
        torchs.step()
        with seen if step else nullcontext():  # the first step makes the moments
            mine.step()
    for name, parameter in other.items():
        assert isinstance(parameter, DTensor) == isinstance(mine.state[parameter]["exp_avg"], DTensor)
        assert torch.equal(local_data(parameter), local_data(partner[name])), name
        for key, moment in mine.state[parameter].items():
            assert torch.equal(local_data(moment), local_data(torchs.state[partner[name]][key])), (name, key)
    assert state.data_index >= 0 and any(isinstance(one, DTensor) for one in other.values())
    return seen.given


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not-fused"])
def test_the_update_is_torchs_bit_for_bit_and_no_kernel_is_given_a_dtensor(fused):
    layout = Layout.of(tensor=2, data=2, zero=3)
    for given in run_parallel(both, 4, layout, fused):
        assert given and not any(issubclass(one, DTensor) for one in given)
