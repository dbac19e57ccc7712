"""From ZeRO 2 on gradients are summed at every micro-batch, whichever rank holds which stages."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from support.configs import config
from support.short_runs import built
from trilith.data import Batch
from trilith.parallel_state import Layout
from trilith.parallel_state.engine.fully_sharded import computed_with, fsdp_modules
from trilith.pipeline.driver import DrivenStage
from trilith.testing import run_parallel
from trilith.training import Precision, Step, TokenLoss

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
