"""Bench times the gathers and sums of FSDP's groups of parameters."""

import time
from itertools import cycle

import pytest
import torch
from support.configs import TINIEST_LLAMA
from trilith.machine.measure import groups_of_parameters
from trilith.models import family_of
from trilith.parallel_state import Layout, ParallelState, engine, initialize
from trilith.testing import run_parallel
from trilith.training import Precision, shard_over_data


def _slow_gathers_and_sums():
    """Delay each gather of a block by 10 ms and each sum by 30 ms; return what is clocked, after one pass
    and after a second one that is not clocked.
    """
    state = ParallelState.start(Layout.of(data=2, zero=3))
    family = family_of(TINIEST_LLAMA)
    model = family.build(family.from_hf(TINIEST_LLAMA), state=state, device="cpu")
    shard_over_data(model, state, Precision())
    initialize(model, 0, state=state)
    modules = engine.fsdp_modules(model.layers)
    for group in engine.fully_sharded._groups(modules):
        gather, total = group._all_gather_comm, group._reduce_scatter_comm
        group._all_gather_comm, group._reduce_scatter_comm = _Late(gather, 0.01), _Late(total, 0.03)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with engine.clocked(modules) as spent:
        model(ids).sum().backward()
    once = dict(spent)
    model(ids).sum().backward()
    wrapped = any("unshard" in vars(group) for group in engine.fully_sharded._groups(modules))
    return {name: one / len(modules) for name, one in once.items()}, _difference(spent, once), wrapped


def _difference(a, b):
    return {name: a[name] - b[name] for name in a}


class _Late:
    """Be a collective of FSDP that begins some seconds later."""

    def __init__(self, collective, seconds):
        self.collective, self.seconds = collective, seconds

    def __getattr__(self, name):
        return getattr(self.collective, name)

    def __call__(self, **arguments):
        time.sleep(self.seconds)
        return self.collective(**arguments)


def test_a_clock_holds_what_blocks_gather_and_sum_meanwhile_and_nothing_else():
    for once, later, wrapped in run_parallel(_slow_gathers_and_sums, 2):
        assert once["all_gather"] >= 2 * 0.01  # in forward and in backward
        assert once["reduce_scatter"] >= 0.03
        assert later == {"all_gather": 0, "reduce_scatter": 0} and not wrapped


def _tiny_exchanges():
    """Time one round in which the sums of a model's groups add 7 s."""
    seconds = cycle((7.0, 0.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups_of_parameters, "seconds_of", lambda work: (work(), next(seconds))[1])
        return groups_of_parameters._exchanges(2, 16, rounds=1)


def test_each_kind_of_collective_is_timed_for_a_block():
    for found, size in run_parallel(_tiny_exchanges, 2, timeout=200):
        assert set(found) == {"all_gather", "reduce_scatter", "all_reduce"}
        assert found["all_gather"] > 0 and found["reduce_scatter"] > 0
        assert found["all_reduce"] == 1  # six blocks, and the root
        assert size == 4 * (4 * 16 * 16 + 3 * 16 * 44 + 2 * 16)
