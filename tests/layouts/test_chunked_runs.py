"""Whole runs under a chunked loss: an output layer trained alone; evaluation that makes no whole logits."""

import pytest
import torch
from support.configs import TINY_LLAMA
from support.short_runs import run_recipe, tiny_recipe
from trilith.checkpoints import read_source
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import ParallelState
from trilith.recipes.recipe import parse_recipe
from trilith.testing import LiveBytes, run_parallel
from trilith.training import Evaluator
from trilith.training.build import build
from trilith.training.run_data import open_held_out
from trilith.training.run_plan import plan

UNTIED = {**TINY_LLAMA, "tie_word_embeddings": False}
HEAD_ALONE = [{"match": "^(lm_)?head", "lr_scale": 1.0}, {"match": ".", "freeze": True}]
ONE = {}
ZERO = {"data": 2, "zero": 3}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chunked")
    write_tokens(folder / "tokens")
    return folder


def head_alone(place, name, layout, chunk):
    """Train only the output layer; return the steps' metrics and that layer in the end."""
    optimizer = {"lr": 1e-2, "warmup": 0, "clip": 0.0, "groups": HEAD_ALONE}
    raw = tiny_recipe(place / name, place / "tokens", steps=3, optimizer=optimizer)
    raw |= {"layout": layout, "memory": {"loss_chunk": chunk}, "model": {"config": UNTIED}}
    (steps, *_) = run_parallel(run_recipe, 2 if layout else 1, raw)
    source = read_source(place / name)
    return steps, source.ours["head.weight"].read()


def test_an_output_layer_trained_alone_is_summed_over_the_data_ranks(place):
    expected, weight = head_alone(place, "whole", ONE, 0)
    for name, layout in (("one", ONE), ("zero", ZERO)):
        steps, found = head_alone(place, name, layout, 5)
        for step, other in zip(steps, expected, strict=True):
            assert step.loss == pytest.approx(other.loss, rel=1e-10)
            assert step.grad_norm == pytest.approx(other.grad_norm, rel=1e-10)
        assert float((found - weight).abs().max()) <= 1e-10 * float(weight.abs().max())


WIDE = {**UNTIED, "vocab_size": 512}


def evaluated(raw):
    """Return the loss on held-out tokens with random weights, and the bytes alive at the worst moment."""
    recipe = parse_recipe(raw)
    state = ParallelState.start(recipe.layout)
    parts = build(recipe, plan(recipe), state)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter.normal_(0.0, 0.1)
    held_out = open_held_out(recipe, WIDE["vocab_size"])
    assert held_out is not None
    with LiveBytes() as memory:
        loss = Evaluator(parts.step, held_out)()
    return loss, memory.peak


@pytest.mark.parametrize("layout", [ONE, ZERO], ids=str)
def test_evaluation_makes_a_chunk_of_logits_at_a_time(place, layout):
    raw = tiny_recipe(
        place / "none", place / "tokens", data={"sequence_length": 64, "global_batch": 8, "micro_batch": 4}
    )
    raw |= {"layout": layout, "model": {"config": WIDE}}
    raw["evaluation"] = {"tokens": str(place / "tokens"), "samples": 7}
    world = 2 if layout else 1
    whole, chunked = (
        run_parallel(evaluated, world, raw | {"memory": {"loss_chunk": chunk}})[0] for chunk in (0, 6)
    )
    assert chunked[0] == pytest.approx(whole[0], rel=1e-12)
    logits = 4 * 64 * 512 * 8
    assert whole[1] > logits
    assert chunked[1] < whole[1] - 0.8 * logits
