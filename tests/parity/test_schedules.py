"""Every schedule trains the same model, whichever rank holds which stages, in every layout it runs in.

Each with each family, axis, stage of ZeRO, and cut by hand: ``test_combinations.py``.
"""

from contextlib import contextmanager

import pytest
import torch
from support.configs import MODELS
from support.short_training import Case
from trilith.data import Batch
from trilith.models import family_of
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.parallel_state.engine import computed_with, fsdp_modules
from trilith.pipeline.driver import DrivenStage
from trilith.testing import run_parallel
from trilith.training import Precision, TrainStep, shard_over_data

LOOP = {"virtual_stages": 2}
SHAPED = {"virtual_stages": 2, "v_shape": True}
SCHEDULES = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": LOOP,
    "interleaved-zero-bubble": LOOP,
    "zbv": SHAPED,
    "dualpipev": SHAPED,
}
SEVERAL = [name for name in SCHEDULES if SCHEDULES[name]]


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("model", ["llama-tied", "gpt2"])
def test_several_stages_a_rank_equal_one_device(model, name, assert_same):
    layout = Layout.of(tensor=2, pipeline=2, sequence=model == "gpt2", **SCHEDULES[name])
    assert_same(model, layout, schedule=name, documents=True)


def test_gradients_of_transposed_stacks_lie_as_the_optimizer_takes_them(assert_same):
    """GPT-OSS multiplies by transposed stacks of experts, and autograd gives gradients transposed as well."""
    config = MODELS["gpt_oss"] | {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    assert_same(Case(config, Layout.of(pipeline=2, **SHAPED), schedule="zbv"))


def whole_gradients(name):
    """Count, after each backward of a step, the elements of blocks' gradients that wait to be summed: for
    each stage of ZeRO from 1.
    """
    return [waiting_gradients(name, zero) for zero in (1, 2, 3)]


def waiting_gradients(name, zero):
    state = ParallelState.start(Layout.of(pipeline=2, data=2, zero=zero, **SCHEDULES[name]))
    family = family_of(MODELS["llama"])
    model = family.build(family.from_hf(MODELS["llama"] | {"num_hidden_layers": 4}), state=state)
    shard_over_data(model, state, Precision(torch.float32, torch.float32, torch.float32))
    model.to_empty(device="cpu")
    initialize(model, 0, state=state)
    step, waiting = TrainStep(model, micro_batch=1, schedule=name), []

    def look(stage, *given, **named):
        held = computed_with(one for one in fsdp_modules(model) if zero >= 2 or one is not model)
        waiting.append(sum(one.grad.numel() for one in held if one.grad is not None))

    ids = torch.zeros(4, 16, dtype=torch.int64)
    with observed_backwards(look):
        step(Batch(ids, ids))
    return waiting


@contextmanager
def observed_backwards(look):
    """Call ``look`` after each of a stage's backwards, whole or half."""
    names = ("backward_one_chunk", "backward_weight_one_chunk")
    before = {name: getattr(DrivenStage, name) for name in names}

    def after(whole):
        def run(stage, *given, **named):
            whole(stage, *given, **named)
            look(stage)

        return run

    for name, one in before.items():
        setattr(DrivenStage, name, after(one))
    try:
        yield
    finally:
        for name, one in before.items():
            setattr(DrivenStage, name, one)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"])
def test_gradients_are_summed_at_every_micro_batch(name):
    """From ZeRO-2 on none is left whole between micro-batches; below, they add up until the last one."""
    for rank in run_parallel(whole_gradients, 4, name):
        for zero, waiting in enumerate(rank, 1):
            assert (max(waiting) == 0) == (zero >= 2), (zero, waiting)
            assert waiting[-1] == 0, (zero, waiting)
