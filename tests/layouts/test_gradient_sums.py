"""From ZeRO 2 on gradients are summed at every micro-batch, whichever rank holds which stages; none twice."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from support.configs import config
from support.refusals import refusal_of
from support.short_runs import built
from trilith.data import Batch
from trilith.layers import RMSNorm
from trilith.parallel_state import Layout, ParallelState, declare, finalize_gradients, initialize
from trilith.parallel_state.engine.fully_sharded import computed_with, fsdp_modules
from trilith.pipeline.driver import DrivenStage
from trilith.testing import run_parallel
from trilith.training import Precision, Step, TokenLoss, shard_over_data

LOOP, SHAPED = {"virtual_stages": 2}, {"virtual_stages": 2, "v_shape": True}
SCHEDULES = {"1f1b": {}, "interleaved-zero-bubble": LOOP, "zbv": SHAPED, "dualpipev": SHAPED}


def whole_gradients(name):
    """Count, after each backward of a step, the elements of blocks' gradients that wait to be summed: for
    each stage of ZeRO from 1.
    """
    return [waiting_gradients(name, zero) for zero in (1, 2, 3)]


def waiting_gradients(name, zero):
    layout = Layout.of(pipeline=2, data=2, zero=zero, **SCHEDULES[name])
    model = built(layout, Precision(*[torch.float32] * 3), config("llama", layers=4))
    step, waiting = Step(model, TokenLoss(model), micro_batch=1, schedule=name), []

    def look():
        held = computed_with(one for one in fsdp_modules(model) if zero >= 2 or one is not model)
        waiting.append(sum(one.grad.numel() for one in held if one.grad is not None))

    ids = torch.zeros(4, 16, dtype=torch.int64)
    with observed_backwards(look):
        step(Batch(ids, ids))
    return waiting


@contextmanager
def observed_backwards(look):
    """Call ``look`` after each of a stage's backwards, whole or half."""
    with ExitStack() as patches:
        for name in ("backward_one_chunk", "backward_weight_one_chunk"):

            def run(*arguments, whole=getattr(DrivenStage, name), **named):
                whole(*arguments, **named)
                look()

            patches.enter_context(mock.patch.object(DrivenStage, name, run))
        yield


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_summed_at_every_micro_batch(name):
    """From ZeRO-2 on none is left whole between micro-batches; below, they add up until the last one."""
    for rank in run_parallel(whole_gradients, 4, name):
        for zero, waiting in enumerate(rank, 1):
            assert (max(waiting) == 0) == (zero >= 2), (zero, waiting)
            assert waiting[-1] == 0, (zero, waiting)


def summed_again(layout):
    """Return what is said of gradients that are summed once more as they are, and after a backward that added
    to them; those that were set to zero before it are summed.
    """
    state, said = ParallelState.start(layout), []
    model = shard_over_data(RMSNorm(8, state=state), state, Precision())
    initialize(model, 1, state=state)
    for between in ("", "add", "zero"):
        model.zero_grad()
        for number in range(2):
            if number == 0 or between:
                model(torch.ones(2, 3, 8)).sum().backward()
            if number and between != "zero":
                said.append(refusal_of(lambda: finalize_gradients(model, state=state)))
            else:
                finalize_gradients(model, state=state)
            if between == "zero":
                model.zero_grad(set_to_none=False)
    return said


@pytest.mark.parametrize("data", [{}, {"data": 2}, {"data": 2, "zero": 2}], ids=str)
def test_partial_gradients_are_not_summed_twice(data):
    layout = Layout.of(tensor=2, sequence=True, **data)
    for said in run_parallel(summed_again, layout.world, layout):
        assert len(said) == 2
        for line in said:
            assert "gradients: expected those of one step's backwards, summed once, found sums" in line


def updated_after_sums(layout):
    """Return the number of steps of a loop that sets many gradients to zero in one call."""
    state = ParallelState.start(layout)
    model = shard_over_data(RMSNorm(8, state=state), state, Precision())
    initialize(model, 1, state=state)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(2, 3, 8)).sum().backward()
        finalize_gradients(model, state=state)
        optimizer.step()
    return int(optimizer.state[model.weight]["step"])


def test_gradients_are_summed_anew_after_an_update():
    assert run_parallel(updated_after_sums, 4, Layout.of(tensor=2, sequence=True, data=2)) == [3] * 4


def summed_in_each_step(layout):
    """Return the sums of two steps with gradients that are set to zero in between, of which only the first
    tensor rank computes one: over the tensor ranks, and as a tied one over the ends of the pipeline.
    """
    state, sums = ParallelState.start(layout), []
    model = torch.nn.LayerNorm(2, bias=False)
    declare(model, "weight", partial=("tensor",), ends=True, state=state)
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        if state.tensor.index == 0:
            (model.weight * 3).sum().backward()
        finalize_gradients(model, state=state)
        sums.append(model.weight.grad.tolist())
    return sums


@pytest.mark.parametrize("pipeline", [1, 2])
def test_partial_gradients_are_summed_in_each_step(pipeline):
    layout = Layout.of(tensor=2, sequence=True, pipeline=pipeline)
    for sums in run_parallel(summed_in_each_step, layout.world, layout):
        assert sums == [[3.0 * pipeline] * 2] * 2
