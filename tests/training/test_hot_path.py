"""Hold what a step costs beside forward and backward: operators, waits of the host for the device, garbage.

Python searches for garbage after steps alone, the same on all ranks; what a step leaves does not grow.
"""

import gc
import weakref
from collections import Counter
from unittest import mock

import pytest
import torch
from support.configs import MODELS, TINIEST_LLAMA, config
from support.families import model_of
from support.short_runs import tiny_recipe, trainer_of
from torch import Tensor
from trilith.data import Batch
from trilith.data.batch import BatchParts
from trilith.parallel_state import NotTrained, clip_gradients, initialize
from trilith.recipes.recipe import parse_recipe
from trilith.runs.metrics import StepMetrics
from trilith.testing import run_parallel
from trilith.testing.operators import Operators
from trilith.training import Step, TokenLoss, make_adamw, trainer
from trilith.training.update import Update

BATCH = Batch(torch.arange(32).view(4, 8), torch.arange(1, 33).view(4, 8))


def parts(blocks=1, *, fused=True):
    model = model_of(TINIEST_LLAMA | {"num_hidden_layers": blocks}, device="cpu")
    initialize(model, 0)
    step = Step(model, TokenLoss(model), micro_batch=2)
    return model, step, Update(model, make_adamw(model, lr=1e-2, fused=fused), clip=0.5)


def test_the_end_of_a_step_takes_as_many_operators_whatever_the_number_of_parameters():
    found = []
    for blocks in (1, 5):
        _, step, update = parts(blocks)
        for _ in range(2):  # the first makes the moments
            result = step.launch(BATCH)
            with Operators() as end:
                update(result)
        found.append(Counter(end.names))
    assert found[0] == found[1]
    assert found[0]["aten::_fused_adamw_"] == 2  # with decay and without


def test_the_host_reads_once_and_after_the_update(monkeypatch):
    """Between the last backward and the optimizer's launch nothing is read from the device."""
    seen = []
    model, step, update = parts()
    step(BATCH)
    model.zero_grad()

    def noted(name):
        inner = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self: (seen.append(name), inner(self))[1])

    for name in ("backward", "tolist", "item", "__bool__", "__float__", "__int__"):
        noted(name)
    update.optimizer.register_step_post_hook(lambda *_: seen.append("update"))
    result = step.launch(BATCH)
    done = update(result)
    assert done.skipped is None
    after = seen[len(seen) - seen[::-1].index("backward") :]
    assert after == ["update", "tolist"]


def test_a_part_of_a_batch_is_asked_for_after_the_backward_of_the_one_before():
    seen, losses, grads = [], [], []

    def coming():
        for part in BATCH.split(2):
            seen.append("part")
            yield part

    for batch in (BATCH, BatchParts(4, 32, coming())):
        model, step, _ = parts()
        model.register_forward_hook(lambda *_: seen.append("forward"))
        model.norm.weight.register_hook(lambda grad: seen.append("backward"))
        losses.append(step(batch))
        grads.append([parameter.grad for parameter in model.parameters()])
    assert seen[4:] == ["part", "forward", "backward"] * 2
    assert torch.equal(*losses) and all(torch.equal(whole, lazy) for whole, lazy in zip(*grads, strict=True))


def stored(model, update):
    moments = [one for state in update.optimizer.state.values() for one in state.values()]
    return [one.detach().clone() for one in (*model.parameters(), *moments)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("fault", ["nan", "infinite loss", "untrained", "zeros"])
def test_an_unfit_step_moves_no_bit_of_weights_or_moments_and_keeps_the_gradients(fault, fused):
    model, step, update = parts(fused=fused)
    update(step.launch(BATCH))
    before = stored(model, update)
    result = step.launch(BATCH)
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    if fault == "nan":
        grads[0].view(-1)[0] = float("nan")
    if fault == "infinite loss":
        result = result._replace(loss=result.loss + float("inf"))
    if fault == "zeros":
        model.zero_grad(set_to_none=False)
    if fault == "untrained":
        model.norm.weight.grad = None
        result = result._replace(checks=result.checks + torch.tensor([0.0, 1.0]))
    if fault in ("nan", "infinite loss"):
        assert update(result).fatal
    else:
        with pytest.raises(NotTrained, match="norm.weight" if fault == "untrained" else "exactly zero"):
            update(result)
    assert all(torch.equal(one, two) for one, two in zip(before, stored(model, update), strict=True))
    assert sum(one.grad is not None for one in model.parameters()) == len(grads) - (fault == "untrained")
    assert update.made == 1


def test_gradients_too_small_to_be_squared_still_train():
    model, step, update = parts()
    update.clip = 0.0
    result = step.launch(BATCH)
    for one in model.parameters():
        assert one.grad is not None
        one.grad.fill_(1e-30)
    before = stored(model, update)
    done = update(result)
    assert done.grad_norm == 0 and done.skipped is None and update.made == 1
    assert not all(torch.equal(one, two) for one, two in zip(before, stored(model, update), strict=False))


def test_the_update_has_the_bits_of_a_loop_of_ones_own():
    made = []
    for own in (False, True):
        model, step, update = parts()
        for _ in range(3):
            if own:
                step(BATCH)
                clip_gradients(model, 0.5)
                update.optimizer.step()
                model.zero_grad()
            else:
                update(step.launch(BATCH))
        made.append(stored(model, update))
    assert all(torch.equal(one, two) for one, two in zip(*made, strict=True))


def searches(raw):
    """Run on a Python that searches all the time; return each search from the beginning of the first step to
    the end of the last but one, as (number of the step, generation), and whether Python searches again.
    """
    seen = []
    now, thresholds = 0, gc.get_threshold()

    def step(point, *, rank, step):
        nonlocal now
        now = step

    def note(phase, info):
        if phase == "start" and 0 < now < raw["steps"]:
            seen.append((now, info["generation"]))

    gc.set_threshold(10, 2, 2)
    gc.callbacks.append(note)
    try:
        with mock.patch.object(trainer, "fault", step), mock.patch.object(trainer, "GARBAGE_EVERY", 3):
            trainer_of(raw).run()
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    return seen, gc.isenabled()


def test_ranks_search_after_the_same_steps_and_at_no_other_time(tmp_path, tokens):
    raw = tiny_recipe(tmp_path / "run", tokens, steps=7, layout={"data": 2})
    expected = [(1, 2), (2, 0), (3, 2), (4, 0), (5, 0), (6, 2)]
    assert run_parallel(searches, 2, raw) == [(expected, True)] * 2


def left(raw):
    """Return the tensors that two later steps leave to the search, and which nothing else would free; and
    whether nothing holds a module of the model once its run is over.
    """
    trainer, tensors = trainer_of(raw), []

    def after(metrics):
        if metrics.step == 1:
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
        if metrics.step == 3:
            gc.collect()
            tensors.extend(str(thing.shape) for thing in gc.garbage if isinstance(thing, torch.Tensor))

    try:
        trainer.run(after)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    modules = [weakref.ref(module) for module in trainer.model.modules()]
    del trainer
    gc.collect()
    return tensors, all(module() is None for module in modules)


SPARING = {"checkpointing": "full", "loss_chunk": 8, "offload": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": {"checkpointing": "selective"}, "dtype": "float32", "compute": "bfloat16"},
        {"layout": {"data": 2, "zero": 3}},
        {"layout": {"tensor": 2, "sequence": True}},
        {"layout": {"data": 2}, "watch": {"norms": 1, "activation_norms": True}, "memory": SPARING},
        {"layout": {"context": 2}},
        {"layout": {"data": 2, "expert": 2}, "model": {"config": MODELS["mixtral"]}},
        {"layout": {"pipeline": 2}},
        {"layout": {"pipeline": 2, "schedule": "zbv"}, "model": {"config": config("llama", layers=4)}},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_no_tensor_of_a_step_waits_for_the_search_and_a_model_is_freed_after_its_run(
    tmp_path, tokens, changes
):
    """A tensor's memory would be there until then, beside that of the next step; the model goes with its
    process groups, whose threads wake a hundred times a second.
    """
    raw = tiny_recipe(tmp_path / "run", tokens, steps=4, data={"global_batch": 4}, **changes)
    world = parse_recipe(raw).layout.world
    assert run_parallel(left, world, raw) == [([], True)] * world


def kept(raw):
    """Return how many steps' metrics there are after each step."""
    counts = []
    trainer_of(raw).run(
        lambda metrics: counts.append(sum(isinstance(one, StepMetrics) for one in gc.get_objects()))
    )
    return counts


def test_a_run_keeps_no_step_s_metrics(tmp_path, tokens):
    (counts,) = run_parallel(kept, 1, tiny_recipe(tmp_path / "run", tokens, steps=6))
    assert counts[-1] <= counts[1] <= 2
