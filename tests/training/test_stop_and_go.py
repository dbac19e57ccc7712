"""Runs that stop and go on: bitwise in the same layout, to 1e-10 in another one.

LoRA and skipped steps have their rows in files of their own.
"""

import pytest
import torch
from support.configs import TINY_GLM, TINY_GPT2, TINY_MIXTRAL, config
from support.short_runs import losses, tiny_recipe, train, whole_tensors
from support.stop_and_go import StopAndGo, check_stop_and_go, differences, stop_and_go
from trilith.checkpoints import convert
from trilith.machine.random_files import write_tokens
from trilith.runs.metrics import read_metrics

GPT2 = {"model": {"config": TINY_GPT2}}
#: Few micro-batches, of a row each: two on each of two data ranks.
FEW = {"global_batch": 4, "micro_batch": 1}
FOUR_GPT2 = {"model": {"config": config("tiny_gpt2", layers=4)}}
MIXTRAL = {"model": {"config": TINY_MIXTRAL}, "data": FEW, "steps": 2}
#: Rates and decays of their own, and parameters that are frozen: those of the first block but for one matrix.
GROUPS = {
    "data": {"global_batch": 4},
    "optimizer": {
        "groups": [
            {"match": r"layers\.0\.mlp\.down_proj", "lr_scale": 0.1, "weight_decay": 0.5},
            {"match": r"layers\.0\.|embed", "freeze": True},
            {"match": "norm", "weight_decay": 0.2},
        ]
    },
}
ONLY_LAST = {
    "data": {"global_batch": 4},
    "optimizer": {"groups": [{"match": r"layers\.2\.", "lr_scale": 1.0}, {"match": ".", "freeze": True}]},
    "model": {"config": config("tiny_llama", tie_word_embeddings=False)},
}
ONE_PROCESS = {"layout": {}}
ZERO1, PP3 = {"data": 2, "zero": 1}, {"pipeline": 3, "split": [1, 1, 1]}


def same(why, layout, *, slow=False, **recipe):
    return StopAndGo(why, [{}, {}], {"layout": layout, "data": FEW, "steps": 3, **recipe}, slow=slow)


def other(why, *layouts, slow=False):
    recipe = {"steps": 4, "data": FEW}
    return StopAndGo(why, [{"layout": layout} for layout in layouts], recipe, slow=slow)


def evaluated(folder):
    held_out = write_tokens(folder / "held-out", seed=5)
    return {"evaluation": {"tokens": str(held_out), "every": 1, "samples": 3}}


test_a_run_that_stops_and_goes_on_equals_one_that_was_never_stopped = stop_and_go(
    same("D1-one-process", {}),
    same("D1-sp", {"tensor": 2, "sequence": True}, slow=True),
    same("D1-dp2", {"data": 2}, slow=True),
    same("D1-zero3", {"data": 2, "zero": 3}),
    same("D1-tp2-pp2", {"tensor": 2, "pipeline": 2}, slow=True),
    same("D1-dropout-tp2", {"tensor": 2}, **GPT2),
    same("D1-dropout-cp2", {"context": 2, "ring": True}, **GPT2),
    same("D1-cp2-zero1", {"context": 2, "zero": 1}, slow=True),
    same("D1-dropout-zbv", {"pipeline": 2, "schedule": "zbv"}, **FOUR_GPT2),
    # A start more of one run costs less than two runs; the pairs alone are run at night.
    other("D4-tp2-pp2-to-zero1-to-cp2-to-one", {"tensor": 2, "pipeline": 2}, ZERO1, {"context": 2}, {}),
    other("D4-zero3-to-pp3-to-tp2", {"data": 2, "zero": 3}, PP3, {"tensor": 2}),
    other("D4-one-to-tp4-sp", {}, {"tensor": 4, "sequence": True}, slow=True),
    other("D4-dp2-to-zero1", {"data": 2}, {"data": 4, "zero": 1}, slow=True),
    other("D4-cp2-zero1-to-tp2", {"context": 2, "data": 2, "zero": 1}, {"tensor": 2}, slow=True),
    other("D4-dp2-to-cp2", {"data": 2}, {"context": 2}, slow=True),
    other("D4-zero2-to-tp2-zero3", {"data": 2, "zero": 2}, {"tensor": 2, "data": 2, "zero": 3}, slow=True),
    StopAndGo(
        "D2-saving-in-the-background-changes-no-bit",
        [{"checkpoint": {"background": True, "every": 1}}] * 2,
        {"layout": ZERO1, "data": FEW, "steps": 3},
        whole={},
    ),
    StopAndGo(
        "another-schedule-whose-ranks-hold-other-blocks-with-evaluation",
        [
            {"layout": {"pipeline": 2, "schedule": "zbv", "data": 2, "zero": 3}},
            {"layout": {"pipeline": 2, "schedule": "interleaved"}},
            {"layout": {"pipeline": 2, "schedule": "1f1b"}},
        ],
        {"model": {"config": config("tiny_llama", layers=4)}, "data": FEW, "steps": 3},
        given=evaluated,
    ),
    StopAndGo(
        "context-ranks-and-a-plain-one-with-documents-apart-and-evaluation",
        [{"layout": {"context": 2, "ring": True}, "memory": {"checkpointing": "selective"}}, {}],
        {"data": {"documents": "separate", "global_batch": 4}, "steps": 4},
        given=evaluated,
    ),
    StopAndGo("experts-over-data-ranks", [{}, {}], {**MIXTRAL, "layout": {"data": 2, "expert": 2}}),
    StopAndGo(
        "experts-on-4-ranks-on-1-on-2",
        [{"layout": {"data": 4, "expert": 4, "zero": 3}}, {}, {"layout": {**ZERO1, "expert": 2}}],
        {**MIXTRAL, "steps": 3},
    ),
    # Vocabulary 131 takes 256 rows on 2 ranks, 384 on 3.
    StopAndGo(
        "three-ranks-2-to-3-to-2",
        [{"layout": {"tensor": tensor}} for tensor in (2, 3, 2)],
        {"model": {"config": config("tiny_llama_of_12_heads")}},
    ),
    StopAndGo(
        "multi-token-prediction",
        [{"layout": {"pipeline": 2}}, {}],
        {"model": {"config": TINY_GLM, "mtp": 0.3}, "data": FEW, "steps": 2},
    ),
    StopAndGo("groups-in-one-layout", [ONE_PROCESS] * 2, {**GROUPS, "steps": 4}, whole=ONE_PROCESS),
    StopAndGo(
        "groups-pp2-first-stage-frozen-but-for-one-into-zero3-into-tensor-ranks",
        [{"layout": {"pipeline": 2, "split": [1, 2]}}] * 2
        + [{"layout": {"data": 2, "zero": 3}}, {"layout": {"tensor": 2}}],
        {**GROUPS, "steps": 4},
        whole=ONE_PROCESS,
    ),
    StopAndGo(
        "groups-a-stage-of-which-nothing-is-trained",
        [{"layout": {"pipeline": 2, "split": [1, 2]}}] * 2,
        {**ONLY_LAST, "steps": 2},
        whole=ONE_PROCESS,
    ),
)


def test_two_runs_with_one_seed_are_bitwise_equal_and_another_seed_is_not_D0(tmp_path, tokens):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(tiny_recipe(tmp_path / name, tokens, seed=seed, layout={"data": 2}, steps=2))
    assert differences(tmp_path / "a", tmp_path / "b") == []
    assert losses(tmp_path / "a") != losses(tmp_path / "c")
    one, another = (whole_tensors(tmp_path / name) for name in "ac")
    assert any(not torch.equal(one[name], another[name]) for name in one)


def test_groups_differ_from_a_usual_run_and_move_no_bit_of_what_is_frozen(tmp_path, tokens):
    for name, changes in (("groups", GROUPS), ("usual", {})):
        train(tiny_recipe(tmp_path / name, tokens, steps=2, **changes))
    groups, usual = (whole_tensors(tmp_path / name) for name in ("groups", "usual"))
    assert losses(tmp_path / "usual")[-1] != pytest.approx(losses(tmp_path / "groups")[-1], rel=1e-4)
    assert groups.keys() < usual.keys()
    frozen = {name.removeprefix("optimizer.exp_avg.") for name in usual.keys() - groups.keys()}
    assert "embed.weight" in frozen and "layers.0.mlp_norm.weight" in frozen
    assert "layers.0.mlp.down.weight" not in frozen and "layers.1.mlp_norm.weight" not in frozen
    convert(tmp_path / "groups", tmp_path / "cut", pipeline=3)
    cut = whole_tensors(tmp_path / "cut")
    assert cut.keys() == groups.keys() and all(torch.equal(cut[name], groups[name]) for name in cut)


RATE = 1 / 64
BIASED = StopAndGo(
    "moved-on-one-rank-by-expert-and-by-tensor-ranks-and-stages",
    [
        {"layout": {**ZERO1, "expert": 2}, "memory": {"offload": True}},
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
