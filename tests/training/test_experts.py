"""Runs of a model with experts: stopped and gone on with wherever the experts lie, and converted."""

import pytest
import torch
from support.configs import TINY_GLM, TINY_MIXTRAL
from support.short_runs import tiny_recipe, train, whole_tensors
from support.stop_and_go import StopAndGo, check_stop_and_go
from transformers import AutoModelForCausalLM
from trilith.checkpoints import load, read_source
from trilith.cli.app import run as command
from trilith.parallel_state import Layout, ParallelState
from trilith.runs.metrics import read_metrics
from trilith.testing import run_parallel
from trilith.testing.layouts import assemble, pieces
from trilith.training import Precision, shard_over_data

EP2 = {"data": 2, "expert": 2, "zero": 1}
EP4 = {"data": 4, "expert": 4, "zero": 3}


def load_rank(layouts, path):
    """Load in each layout in turn, with offload in every other one."""
    found = []
    for number, layout in enumerate(layouts):
        state, source = ParallelState.start(layout), read_source(path)
        model = source.family.build(source.model_config, state=state, dtype=torch.float64)
        shard_over_data(model, state, Precision(*[torch.float64] * 3), offload=number % 2 == 1)
        model.to_empty(device="cpu")
        load(path, model)
        found.append(pieces(model, state))
    return found


WHEREVER = StopAndGo(
    "on-4-ranks-on-1-on-2",
    [{"layout": layout} for layout in (EP4, {}, EP2)],
    {"model": {"config": TINY_MIXTRAL}, "data": {"micro_batch": 1}, "steps": 3},
)


def test_a_run_goes_on_wherever_the_experts_lie_and_is_converted(tmp_path, tmp_path_factory):
    parts = check_stop_and_go(WHEREVER, tmp_path, tmp_path_factory)
    found = whole_tensors(parts)
    assert "optimizer.exp_avg_sq.layers.1.mlp.experts.down" in found
    assert {"balance_loss", "router_z_loss", "expert_load"} <= {*read_metrics(parts / "metrics.jsonl")[0]}

    loaded = assemble(
        [rank[0] for rank in run_parallel(load_rank, 4, [Layout.of(data=4, expert=2, zero=1)], str(parts))]
    )
    assert all(torch.equal(one, found[name]) for name, one in loaded.items()) and len(loaded) > 10

    hf, back = tmp_path / "hf", tmp_path / "back"
    assert command(["convert", str(parts), str(hf), "--to", "hf"]) == 0
    assert command(["convert", str(hf), str(back), "--tensor", "2", "--pipeline", "2"]) == 0
    again = whole_tensors(back)
    assert all(torch.equal(again[name], found[name]) for name in again) and len(again) > 10


def biases(path):
    return {name: bias for name, bias in whole_tensors(path).items() if name.endswith("router.bias")}


RATE = 1 / 64
BIASED = StopAndGo(
    "moved-on-one-rank-by-expert-and-by-tensor-ranks-and-stages",
    [
        {"layout": EP2, "memory": {"offload": True}},
        {"layout": {"tensor": 2, "pipeline": 2, "sequence": True}},
    ],
    {"model": {"config": TINY_GLM}, "data": {"micro_batch": 1}, "experts": {"bias_rate": RATE}, "steps": 3},
)


def test_biases_are_of_the_model_and_a_run_goes_on_with_them_in_any_layout(tmp_path, tmp_path_factory):
    """Biases in another layout have the same bits; so they are loaded, exported and cast."""
    parts = check_stop_and_go(BIASED, tmp_path, tmp_path_factory)
    moved, last = biases(parts), whole_tensors(parts)
    steps = {round(float(number) / RATE) for bias in moved.values() for number in bias}
    assert moved.keys() == {f"layers.{i}.mlp.router.bias" for i in (1, 2)}
    assert steps <= {*range(-3, 4)} and len(steps) > 1
    assert not any(name.endswith("_sq.layers.1.mlp.router.bias") for name in last)

    layouts = [
        Layout.of(data=4),
        Layout.of(tensor=2, data=2, expert=2, zero=2),
        Layout.of(pipeline=2, data=2, zero=3),
    ]
    ranks = run_parallel(load_rank, 4, layouts, str(parts))
    for number, layout in enumerate(layouts):
        loaded = assemble([rank[number] for rank in ranks])
        for name, bias in moved.items():
            assert loaded[name].dtype == torch.float32 and torch.equal(loaded[name], bias), layout

    hf, half, back = (tmp_path / name for name in ("hf", "half", "back"))
    assert command(["convert", str(parts), str(hf), "--to", "hf"]) == 0
    assert command(["convert", str(parts), str(half), "--to", "hf", "--dtype", "bfloat16"]) == 0
    assert command(["convert", str(half), str(back), "--tensor", "2", "--pipeline", "2"]) == 0
    for path in (hf, half):
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        held = dict(theirs.named_buffers())
        for i in (1, 2):
            bias = held[f"model.layers.{i}.mlp.gate.e_score_correction_bias"]
            assert bias.dtype == torch.float32 and torch.equal(bias, moved[f"layers.{i}.mlp.router.bias"])
    again = biases(back)
    assert again.keys() == moved.keys() and all(torch.equal(again[name], moved[name]) for name in moved)


def test_the_recipe_sets_the_losses_of_the_routers(tmp_path, tokens):
    """The config's factor given in the recipe is the same run; a z-loss makes the logits smaller."""
    quiet = TINY_MIXTRAL | {"output_router_logits": False}
    said = [{}, {"experts": {"balance": 0.1}}, {"experts": {"z_loss": 1.0}}]
    configs = [TINY_MIXTRAL, quiet, quiet]
    for number, (model, more) in enumerate(zip(configs, said, strict=True)):
        train(tiny_recipe(tmp_path / str(number), tokens, model={"config": model}, **more))
    keys = ("loss", "balance_loss", "router_z_loss")
    runs = (read_metrics(tmp_path / str(number) / "metrics.jsonl") for number in range(3))
    one, same, other = ([[line[key] for key in keys] for line in lines] for lines in runs)
    assert one == same and one[0] == pytest.approx(other[0])
    assert other[-1][2] < 0.9 * one[-1][2]
