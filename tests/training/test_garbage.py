"""Python searches for garbage after steps alone, the same on all ranks; what a step leaves does not grow."""

import gc
import weakref
from unittest import mock

import pytest
import torch
from support.configs import MODELS, config
from support.short_runs import tiny_recipe, trainer_of
from trilith.recipes.recipe import parse_recipe
from trilith.runs.metrics import StepMetrics
from trilith.testing import run_parallel
from trilith.training import trainer


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
