"""Runs of a model with experts: stopped and gone on with wherever the experts lie, and converted."""

import pytest
import torch
from support.configs import TINY_GLM, TINY_LLAMA, TINY_MIXTRAL
from support.short_runs import run_recipe, tiny_recipe
from transformers import AutoConfig, AutoModelForCausalLM
from trilith.checkpoints import load_weights, read_source
from trilith.cli.app import run as command
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput, Box, Layout, ParallelState
from trilith.recipes.recipe import parse_recipe
from trilith.runs.metrics import read_metrics
from trilith.testing import run_parallel
from trilith.testing.layouts import assemble, pieces
from trilith.training import Precision, shard_over_data
from trilith.training.run_plan import plan

EP2 = {"data": 2, "expert": 2, "zero": 1}
EP4 = {"data": 4, "expert": 4, "zero": 3}


def recipe(folder, tokens, layout, **changes):
    changes = {"model": {"config": TINY_MIXTRAL}} | changes
    changes["data"] = {"micro_batch": 1} | changes.get("data", {})
    return tiny_recipe(folder, tokens, layout=layout, **changes)


def run(raw):
    run_parallel(run_recipe, parse_recipe(raw).layout.world, raw)


def lines(out, *keys):
    return [[line[key] for key in keys] for line in read_metrics(out / "metrics.jsonl")]


def tensors(path):
    source = read_source(path)
    links = source.links()
    return {name: source.read(name, Box.whole(whole.shape), links) for name, whole in source.catalog.items()}


def load_rank(layouts, path):
    """Load in each layout in turn, with offload in every other one."""
    found = []
    for number, layout in enumerate(layouts):
        state, source = ParallelState.start(layout), read_source(path)
        model = source.family.build(source.model_config, state=state, dtype=torch.float64)
        shard_over_data(model, state, Precision(*[torch.float64] * 3), offload=number % 2 == 1)
        model.to_empty(device="cpu")
        load_weights(path, model, source.family, source.model_config)
        found.append(pieces(model, state))
    return found


@pytest.fixture
def tokens(tmp_path):
    return write_tokens(tmp_path / "tokens")


def test_a_run_goes_on_wherever_the_experts_lie_and_is_converted(tmp_path, tokens):
    """The experts are on 4 ranks, on 1, on 2, on 4 again: the run is as if nothing had changed."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(recipe(whole, tokens, {}, steps=4))
    for stop, layout in enumerate((EP4, {}, EP2, EP4), 1):
        run(recipe(parts, tokens, layout, steps=4, stop_after=stop))
    keys = ("loss", "grad_norm", "balance_loss", "router_z_loss", "expert_load")
    for one, other in zip(lines(whole, *keys), lines(parts, *keys), strict=True):
        assert other == pytest.approx(one, rel=1e-10)
    expected, found = tensors(whole), tensors(parts)
    assert expected.keys() == found.keys()
    assert "optimizer.exp_avg_sq.layers.1.mlp.experts.down" in found
    for name, tensor in expected.items():
        worst = float((found[name] - tensor).abs().max())
        assert worst <= 1e-10 * float(tensor.abs().max()), name

    loaded = assemble(
        [rank[0] for rank in run_parallel(load_rank, 4, [Layout.of(data=4, expert=2, zero=1)], str(parts))]
    )
    assert all(torch.equal(one, found[name]) for name, one in loaded.items()) and len(loaded) > 10

    hf, back = tmp_path / "hf", tmp_path / "back"
    assert command(["convert", str(parts), str(hf), "--to", "hf"]) == 0
    assert command(["convert", str(hf), str(back), "--tensor", "2", "--pipeline", "2"]) == 0
    again = tensors(back)
    assert all(torch.equal(again[name], found[name]) for name in again) and len(again) > 10


def biases(path):
    return {name: one for name, one in tensors(path).items() if name.endswith("router.bias")}


def test_biases_are_of_the_model_and_a_run_goes_on_with_them_in_any_layout(tmp_path, tokens):
    """Moved on one rank, by expert and by tensor ranks and stages; loaded, exported and cast, bit for bit."""
    whole, parts, rate = tmp_path / "whole", tmp_path / "parts", 1 / 64
    same = {"model": {"config": TINY_GLM}, "experts": {"bias_rate": rate}, "steps": 3}
    run(recipe(whole, tokens, {}, **same))
    cuts = [
        {"layout": EP2},
        {"layout": {"tensor": 2, "pipeline": 2, "sequence": True}},
        {"layout": EP4, "memory": {"offload": True}},
    ]
    for stop, how in enumerate(cuts):
        run(recipe(parts, tokens, **how, **same, stop_after=stop + 1))
        moved = biases(parts)
        steps = {round(float(one) / rate) for bias in moved.values() for one in bias}
        assert moved.keys() == {f"layers.{i}.mlp.router.bias" for i in (1, 2)}
        assert steps <= {*range(-stop - 1, stop + 2)} and len(steps) > 1
    keys = ("loss", "grad_norm", "balance_loss", "expert_load")
    for one, other in zip(lines(whole, *keys), lines(parts, *keys), strict=True):
        assert other == pytest.approx(one, rel=1e-10)
    expected, found = tensors(whole), tensors(parts)
    assert expected.keys() == found.keys() and not [
        n for n in found if n.endswith("_sq.layers.1.mlp.router.bias")
    ]
    for name, tensor in expected.items():
        worst = float((found[name] - tensor).abs().max())
        assert worst <= (0.0 if name in moved else 1e-10 * float(tensor.abs().max())), name

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


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TINY_MIXTRAL, r"bias_rate: expected 0: the routers of mixtral have no biases, found 0\.1"),
        (TINY_LLAMA, "experts: expected a model with experts, found llama"),
    ],
)
def test_a_rate_of_biases_that_a_model_has_not_is_refused(tmp_path, tokens, config, words):
    raw = recipe(tmp_path, tokens, {}, model={"config": config}, experts={"bias_rate": 0.1})
    with pytest.raises(BadInput, match=words):
        plan(parse_recipe(raw))


def test_a_rate_of_biases_is_refused_beside_adapters(tmp_path, tokens):
    """They are the base's, and a checkpoint of adapters has none of it."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_GLM)).save_pretrained(tmp_path / "base")
    raw = recipe(tmp_path, tokens, {}, experts={"bias_rate": 0.1}, lora={"r": 2})
    raw["model"] = {"init_from": str(tmp_path / "base")}
    with pytest.raises(BadInput, match=r"experts\.bias_rate: expected 0 with \[lora\].*, found 0\.1"):
        plan(parse_recipe(raw))
    plan(parse_recipe({**raw, "experts": {"balance": 0.1}}))


@pytest.mark.parametrize(
    "layout", [{"data": 2, "expert": 2}, pytest.param(EP4, marks=pytest.mark.slow)], ids=str
)
def test_stopped_and_gone_on_with_in_one_layout_it_is_bitwise(tmp_path, tokens, layout):
    run(recipe(tmp_path / "whole", tokens, layout, steps=2))
    for stop in (1, 2):
        run(recipe(tmp_path / "parts", tokens, layout, steps=2, stop_after=stop))
    keys = ("loss", "grad_norm")
    assert lines(tmp_path / "whole", *keys) == lines(tmp_path / "parts", *keys)
    whole, parts = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_recipe_sets_the_losses_of_the_routers(tmp_path, tokens):
    """The config's factor given in the recipe is the same run; a z-loss makes the logits smaller."""
    quiet = TINY_MIXTRAL | {"output_router_logits": False}
    said = [
        {},
        {"experts": {"balance": 0.1}},
        {"experts": {"z_loss": 1.0}},
    ]
    configs = [TINY_MIXTRAL, quiet, quiet]
    for number, (config, more) in enumerate(zip(configs, said, strict=True)):
        run(recipe(tmp_path / str(number), tokens, {}, model={"config": config}, **more))
    one, same, other = (
        lines(tmp_path / str(number), "loss", "balance_loss", "router_z_loss") for number in range(3)
    )
    assert one == same and one[0] == pytest.approx(other[0])
    assert other[-1][2] < 0.9 * one[-1][2]
    with pytest.raises(BadInput, match=r"recipe: experts: expected a model with experts, found llama"):
        raw = recipe(tmp_path, tokens, {}, model={"config": TINY_LLAMA}, experts={"balance": 0.1})
        plan(parse_recipe(raw))


@pytest.mark.parametrize(
    ("layout", "config", "words"),
    [
        ({"data": 6, "expert": 4}, TINY_MIXTRAL, r"a divisor of context \* data = 6, found 4.*2 or 3"),
        ({"data": 4, "expert": 3, "zero": 1}, TINY_MIXTRAL, r"context \* data_shard = 4, found 3.*2 or 4"),
        (
            {"data": 8, "expert": 8},
            TINY_MIXTRAL,
            "a divisor of 4 experts, found 8. Nearest legal expert: 2 or 4",
        ),
        (
            {"data": 2, "expert": 2},
            TINY_LLAMA,
            "1: this model has no experts, found 2. Nearest legal expert: 1",
        ),
    ],
)
def test_experts_that_cannot_be_dealt_out_are_refused_before_anything_starts(tmp_path, layout, config, words):
    raw = recipe(tmp_path, tmp_path / "none", layout, model={"config": config}, data={"global_batch": 24})
    with pytest.raises(BadInput, match=words) as error:
        plan(parse_recipe(raw))
    assert "\n" not in str(error.value)
