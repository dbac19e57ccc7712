"""The planned activations of whole models against the bytes that are alive between forward and backward."""

import time
from contextlib import nullcontext

import pytest
import torch
from support.configs import MODELS
from torch._subclasses.fake_tensor import FakeTensorMode
from trilith.layers import Cost, checkpoint_blocks
from trilith.models import family_of, published_size
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.planner import Work, stage_costs
from trilith.planner.activations import saved_under
from trilith.planner.memory import needs_of_rank
from trilith.testing import LiveBytes, run_parallel


def alive_by_plan(raw, mode, *, rows, length, fake):
    """Return the bytes that a forward leaves alive, logits among them, over the plan's.

    ``fake``: with tensors that have a size and no memory, so that a model may be of any size.
    """
    family = family_of(raw)
    config = family.from_hf(raw)
    model = family.build(config, device="meta" if fake else "cpu")
    if not fake:
        initialize(model, 0)
    checkpoint_blocks([(int(number), block) for number, block in model.layers.items()], mode)
    work = Work(ParallelState.alone(), config.hidden_size, length, rows, 1, checkpointing=mode, fused=False)
    (cost,) = stage_costs(work, model)
    assert cost.loss is not None
    planned = max(need.held for need in needs_of_rank(work, [cost])) + cost.loss.kept
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        if fake:
            model.to_empty(device="cpu")
        ids = torch.zeros(rows, length, dtype=torch.long)
        with LiveBytes(model.parameters(), ids) as memory:
            before = memory.now
            logits = model(ids)
            assert logits.requires_grad
            return (memory.now - before) / planned


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_model_of_a_billion_parameters_keeps_what_its_plan_says(mode):
    raw = dict(published_size("llama-3.2-1b").with_fields({}))
    assert alive_by_plan(raw, mode, rows=2, length=1024, fake=True) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_computes_some_again_keeps_what_its_plan_says(name):
    assert 0.99 < alive_by_plan(MODELS[name], "selective", rows=4, length=64, fake=False) <= 1


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_as_wide_as_the_block_keep_what_the_plan_says(name):
    """Their second product reads as many numbers as the first one, and is kept, too."""
    raw = MODELS[name] | {"intermediate_size": MODELS[name]["hidden_size"]}
    assert 0.99 < alive_by_plan(raw, "selective", rows=4, length=64, fake=False) <= 1


ROWS, LENGTH = 3, 16


def _now_and_soon(memory):
    for _ in range(20):
        yield memory.now
        time.sleep(0.01)


def kept_by_a_block(layout, mode):
    """Return the bytes that each further block leaves alive on a rank after the forward."""
    alive = []
    for blocks in (1, 4):
        state = ParallelState.start(layout)
        raw = {**MODELS["llama"], "num_hidden_layers": blocks}
        family = family_of(raw)
        model = family.build(family.from_hf(raw), state=state, device="cpu")
        initialize(model, 0, state=state)
        checkpoint_blocks([(int(number), block) for number, block in model.layers.items()], mode)
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        with LiveBytes(model.parameters(), ids) as memory:
            before = memory.now
            logits = model(ids)
            assert logits.requires_grad
            # A thread of gloo may hold the last messages a little longer.
            alive.append(min(_now_and_soon(memory)) - before)
    return (alive[1] - alive[0]) / 3


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "cut"])
def test_what_a_checkpointed_block_keeps_is_cut_over_the_tensor_ranks_under_sequence_parallelism(sequence):
    """A block keeps its input and nothing else: whole on each rank, or one piece of it on each."""
    raw = MODELS["llama"]
    whole = ROWS * LENGTH * raw["hidden_size"] * 4
    layout = Layout.of(tensor=2, sequence=sequence)
    assert set(run_parallel(kept_by_a_block, 2, layout, "full")) == {whole / 2 if sequence else whole}
    work = Work(ParallelState.stand_in(layout), raw["hidden_size"], LENGTH, ROWS, 1, checkpointing="full")
    assert saved_under("full", Cost(), work).kept == (whole / 2 if sequence else whole)
