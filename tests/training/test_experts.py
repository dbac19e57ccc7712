"""Runs of a model with experts: the biases and the losses of their routers."""

import pytest
from support.configs import TINY_GLM, TINY_MIXTRAL
from support.short_runs import tiny_recipe, train, whole_tensors
from support.stop_and_go import StopAndGo, check_stop_and_go
from trilith.runs.metrics import read_metrics

EP2 = {"data": 2, "expert": 2, "zero": 1}

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
    """Conversion and casts of biases have their rows in the tests of checkpoints."""
    parts = check_stop_and_go(BIASED, tmp_path, tmp_path_factory)
    last = whole_tensors(parts)
    moved = {name: bias for name, bias in last.items() if name.endswith("router.bias")}
    steps = {round(float(number) / RATE) for bias in moved.values() for number in bias}
    assert moved.keys() == {f"layers.{i}.mlp.router.bias" for i in (1, 2)}
    assert steps <= {*range(-3, 4)} and len(steps) > 1
    assert not any(name.endswith("_sq.layers.1.mlp.router.bias") for name in last)


def test_the_recipe_sets_the_losses_of_the_routers(tmp_path, tokens):
    """The config's factor given in the recipe is the same run; a z-loss makes the logits smaller."""
    quiet = TINY_MIXTRAL | {"output_router_logits": False}
    said = [{}, {"experts": {"balance": 0.1}}, {"experts": {"z_loss": 1.0}}]
    configs = [TINY_MIXTRAL, quiet, quiet]
    for number, (model, more) in enumerate(zip(configs, said, strict=True)):
        train(tiny_recipe(tmp_path / str(number), tokens, model={"config": model}, **more))
    keys = ("loss", "balance_loss", "router_z_loss", "expert_load")
    runs = (read_metrics(tmp_path / str(number) / "metrics.jsonl") for number in range(3))
    one, same, other = ([[line[key] for key in keys] for line in lines] for lines in runs)
    assert one == same and one[0][:3] == pytest.approx(other[0][:3])
    assert other[-1][2] < 0.9 * one[-1][2]
