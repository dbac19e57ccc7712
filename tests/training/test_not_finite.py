"""A number that is not finite: all ranks stop before the update, and the first module to give it is named."""

import pytest
import torch
from support.short_runs import tiny_recipe, trainer_of
from torch import nn
from trilith.parallel_state import PeerFailed
from trilith.parallel_state.engine import local_data
from trilith.recipes.recipe import parse_recipe
from trilith.runs.events import read_events
from trilith.runs.metrics import read_metrics
from trilith.testing import run_parallel
from trilith.training.not_finite import last_not_finite

LAYOUTS = {"one": {}, "tp2": {"tensor": 2}, "pp2": {"pipeline": 2}, "dp2": {"data": 2}}
LAYOUTS["zero3"] = {"data": 2, "zero": 3}


def stopped(raw, spoil):
    """Take two good steps, then call ``spoil`` on this rank; return the error, and whether weights stayed."""
    trainer, before = trainer_of(raw), []

    def after(metrics):
        if metrics.step == 1:
            spoil(trainer)
            before.extend(local_data(one).clone() for one in trainer.model.parameters())

    try:
        trainer.run(after)
    except PeerFailed as error:
        now = [local_data(one) for one in trainer.model.parameters()]
        same = all(unchanged(a, b) for a, b in zip(before, now, strict=True))
        return str(error), same
    return "", False


def unchanged(a, b):
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def weight(trainer):
    """Spoil one element of a weight of the last block on the last rank, which has it in every layout."""
    name = "layers.2.mlp.gate_up.up.weight"
    if trainer.state.rank == trainer.state.layout.world - 1:
        local_data(trainer.model.get_parameter(name))[-1, 0] = float("nan")


def row_weight(trainer):
    """Spoil a matrix whose product is summed over the tensor ranks before anybody checks it."""
    if trainer.state.rank == 1:
        local_data(trainer.model.get_parameter("layers.1.mlp.down.weight"))[0, 0] = float("inf")


def output(trainer):
    """Spoil the output of the attention on the last rank that has the block."""
    if trainer.state.rank == trainer.state.layout.world - 1:
        attention = trainer.model.get_submodule("layers.2.attention")
        attention.register_forward_hook(lambda module, inputs, out: out / 0)


def backward(trainer):
    """Spoil only the gradient of a block's output, on rank 0: the forward is sound."""
    if trainer.state.rank == 0:
        block = trainer.model.layers["1"]

        def spoil(module, inputs, out):
            if out.requires_grad:
                out.register_hook(lambda grad: grad * float("nan"))

        block.register_forward_hook(spoil)


def said(tmp_path, tokens, layout, spoil):
    """Return the error that all ranks report alike, after checking that none has updated anything."""
    raw = tiny_recipe(tmp_path / "run", tokens, layout=LAYOUTS[layout])
    found = run_parallel(stopped, parse_recipe(raw).layout.world, raw, spoil)
    assert len({text for text, _ in found}) == 1, found
    assert all(same for _, same in found), "the update went through"
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2
    event = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert (event["event"], event["step"], event["why"]) == ("failed", 2, found[0][0])
    return found[0][0]


@pytest.mark.parametrize(("layout", "rank"), [("one", 0), ("tp2", 1), ("pp2", 1), ("zero3", 1)])
def test_a_bad_weight_is_named_by_its_module_and_rank(tmp_path, tokens, layout, rank):
    what = f"rank {rank}: the output of layers.2.mlp.gate_up is not finite"
    assert said(tmp_path, tokens, layout, weight) == f"step 3: {what}; nothing was updated"


def test_a_bad_weight_whose_product_is_summed_inside_the_module_is_its_rank_s(tmp_path, tokens):
    text = said(tmp_path, tokens, "tp2", row_weight)
    assert text.startswith("step 3: rank 1: the output of layers.1.mlp.down is not finite")


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_bad_output_on_one_rank_is_named(tmp_path, tokens, layout):
    text = said(tmp_path, tokens, layout, output)
    assert text.startswith("step 3: rank 1: the output of layers.2.attention is not finite")


@pytest.mark.parametrize("layout", ["one", "pp2"])
def test_a_fault_in_the_backward_pass_is_named_by_the_nearest_gradient(tmp_path, tokens, layout):
    text = said(tmp_path, tokens, layout, backward)
    assert text.startswith("step 3: rank 0: the gradient of layers.1.mlp.down.weight is not finite")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_last_gradient_that_is_not_finite_is_named(value):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model(torch.randn(6, 4)).pow(2).sum().backward()
    assert last_not_finite(model) is None
    model.get_parameter("0.weight").grad[0, 1] = value
    model.get_parameter("1.weight").grad[2, 3] = value
    assert last_not_finite(model) == "1.weight"
