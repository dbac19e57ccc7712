"""Runs that train LoRA: checkpoints of adapters alone, resumed, given to PEFT; the base must be the same."""

import peft
import pytest
import torch
from support.configs import TINY_GLM, TINY_LLAMA
from support.damage import flip_bit
from support.families import transformers_model
from support.short_runs import losses, tiny_recipe, train, whole_tensors
from support.stop_and_go import StopAndGo, stop_and_go
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from trilith.checkpoints import convert, differences, read_adapter, read_source
from trilith.cli.app import run as trilith
from trilith.machine.random_files import write_hf_folder
from trilith.models import LoraConfig, adapted, family_of, implemented_by
from trilith.parallel_state import BadInput, Layout, ParallelState, initialize
from trilith.parallel_state.engine import local_data
from trilith.recipes.recipe import parse_recipe
from trilith.runs.metrics import read_metrics
from trilith.testing import run_parallel
from trilith.training.build import build
from trilith.training.run_plan import plan

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def write_base(folder):
    transformers_model(TINY_LLAMA).save_pretrained(folder)
    return folder


def on_a_base(folder):
    return {"model": {"config": None, "init_from": str(write_base(folder / "base"))}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base, tokens):
    """Return the folder of a run of four steps, which no test changes."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(recipe(out, base, tokens))
    return out


def recipe(out, base, tokens, **changes):
    raw = tiny_recipe(out, tokens, **{"lora": LORA, "steps": 4, **changes})
    raw["model"] = {"init_from": str(base)}
    return raw


ADAPTERS, ANOTHER = {"lora": LORA, "steps": 4}, {"layout": {"tensor": 2, "pipeline": 2}}
test_a_run_of_adapters_that_stops_and_goes_on_equals_one_that_was_never_stopped = stop_and_go(
    StopAndGo("in-one-layout", [{}, {}], ADAPTERS, given=on_a_base),
    StopAndGo("into-another-layout", [{}, ANOTHER], ADAPTERS, whole={}, given=on_a_base),
)


def test_adapters_are_resharded_with_their_moments_and_started_from(tmp_path, base, tokens, trained):
    convert(trained, tmp_path / "cut", to="sharded", tensor=2, pipeline=3)
    assert not list(differences(read_source(tmp_path / "cut"), read_source(trained)))
    names = [name.split(".") for name in whole_tensors(trained)]
    assert {name[-1] for name in names} == {"lora_A", "lora_B"}
    assert {name[1] for name in names if name[0] == "optimizer"} == {"exp_avg", "exp_avg_sq"}
    convert(tmp_path / "cut", tmp_path / "adapter", to="peft")
    for name in ("cut", "adapter"):
        changes = {"steps": 1, "lora": {"init_from": str(tmp_path / name)}}
        train(recipe(tmp_path / f"from-{name}", base, tokens, **changes))
    first = losses(tmp_path / "from-cut")
    assert first == losses(tmp_path / "from-adapter")
    assert first[0] != losses(trained)[0]


def numbers(raw):
    """Return the number formats in which this rank stores base and adapters."""
    loaded = parse_recipe(raw)
    model = build(loaded, plan(loaded), ParallelState.start(loaded.layout))[0].model
    kinds = {"base": set(), "adapters": set()}
    for name, parameter in model.named_parameters():
        kinds["adapters" if "lora_" in name else "base"].add(local_data(parameter).dtype)
        assert parameter.requires_grad == ("lora_" in name)
    return kinds


@pytest.mark.parametrize("zero", [0, 3])
def test_under_bfloat16_the_base_is_kept_in_it_and_the_adapters_are_not(
    tmp_path, base, tokens, trained, zero
):
    """A base in fp32 would be cast to bf16 at each use anyway."""
    mixed = {"dtype": "float32", "compute": "bfloat16", "layout": {"data": 2, "zero": zero}}
    raw = recipe(tmp_path / "run", base, tokens, steps=1, **mixed)
    for kinds in run_parallel(numbers, 2, raw):
        assert kinds == {"base": {torch.bfloat16}, "adapters": {torch.float32}}
    train(raw)
    assert {whole.dtype for whole in read_source(tmp_path / "run").catalog.values()} == {"F32"}
    assert losses(tmp_path / "run")[0][0] == pytest.approx(losses(trained)[0][0], rel=1e-2)


def test_a_run_that_has_only_skipped_steps_is_saved_and_goes_on(tmp_path, base, tokens):
    """The run is in float16, and its loss scale is too high at first.

    With a watch for spikes a skipped step does not call the optimizer, which would make moments by itself.
    """
    half = {"dtype": "float32", "compute": "float16", "loss_scale": {"initial": 2.0**24}}
    half["optimizer"] = {"skip_spikes": {"window": 4, "deviations": 100.0}}
    train(recipe(tmp_path / "run", base, tokens, stop_after=1, **half))
    moments = [one for name, one in whole_tensors(tmp_path / "run").items() if name.startswith("optimizer.")]
    assert moments and not any(bool(one.any()) for one in moments)
    train(recipe(tmp_path / "run", base, tokens, **half))
    skipped = [line.get("skipped") for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert skipped[0] == "overflow" and skipped[-1] is None and len(skipped) == 4
    assert any(bool(one.any()) for name, one in whole_tensors(tmp_path / "run").items() if "lora_B" in name)


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}], ids=str)
def test_groups_find_adapters_by_pefts_names_and_freeze_some(tmp_path, base, tokens, layout):
    """A stays as it was drawn (LoRA-FA), and the last block's B hardly move, at their own rate."""
    groups = [
        {"match": r"self_attn\.[qv]_proj\.lora_A", "freeze": True},
        {"match": r"^base_model\.model\.model\.layers\.2\..*lora_B\.weight$", "lr_scale": 1e-9},
    ]
    raw = recipe(tmp_path / "run", base, tokens, layout=layout, optimizer={"groups": groups})
    train(raw | {"stop_after": 2})
    train(raw)
    source, last = read_source(tmp_path / "run"), whole_tensors(tmp_path / "run")
    model = source.family.build(source.model_config, device="cpu", dtype=torch.float64)
    initialize(model, raw["seed"])
    drawn = {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}
    moved = {name: float((last[name] - one).abs().max()) for name, one in drawn.items()}
    frozen = {name for name in drawn if "attention" in name and "lora_A" in name}
    assert frozen == {name for name in drawn if moved[name] == 0}
    assert frozen == {name for name in drawn if f"optimizer.exp_avg.{name}" not in last}
    slow = {name for name in drawn if "layers.2." in name and "lora_B" in name}
    assert slow == {name for name in drawn if 0 < moved[name] < 1e-6}


def test_adapters_go_on_with_the_same_base_elsewhere_and_are_read_with_no_other(tmp_path, base, tokens):
    train(recipe(tmp_path / "run", base, tokens, stop_after=1))
    convert(base, tmp_path / "moved", tensor=2)
    train(recipe(tmp_path / "run", tmp_path / "moved", tokens, stop_after=2))
    assert len(losses(tmp_path / "run")) == 2
    write_hf_folder(tmp_path / "other", TINY_LLAMA)
    with pytest.raises(BadInput, match="that the adapters were trained on"):
        read_adapter(tmp_path / "run", read_source(tmp_path / "other"))


@pytest.mark.parametrize("by", ["auto", "transformers"])
def test_adapters_on_all_linears_pass_experts_over(by):
    """PEFT would take the linears beside experts for experts, so no such adapter is written for it."""
    raw = implemented_by(TINY_GLM, by)
    family = family_of(raw)
    config = family.from_hf(raw)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_GLM))
    linears = {name for name, one in theirs.named_modules() if isinstance(one, nn.Linear)} - {"lm_head"}
    every = adapted(family, LoraConfig(r=2))
    assert {site.name for site in every.sites(config)} == linears and len(linears) == 21
    with pytest.raises(BadInput, match=r"model\.layers\.0\.mlp\.(gate|down)_proj.*merge-lora"):
        every.to_peft(config, None)
    attention = adapted(family, LoraConfig(r=2, target_modules=("q_proj", "o_proj")))
    attached = peft.get_peft_model(theirs, peft.LoraConfig(**attention.to_peft(config, None)))
    named = {n.partition(".lora_A")[0] for n, _ in attached.named_parameters() if "lora_A" in n}
    assert named == {f"base_model.model.{site.name}" for site in attention.sites(config)}
    # The refusal names another way: exclude the experts.
    with pytest.raises(BadInput, match=r"expert: expected (a divisor|1 for glm4_moe)"):
        every.check_layout(config, Layout.of(data=3, expert=3))
    without = LoraConfig(r=2, target_modules=("gate_proj",), exclude_modules=r".*\.experts(\..*)?")
    few = adapted(family, without)
    few.check(config, "recipe: lora")
    assert [site.name for site in few.sites(config)] == [
        "model.layers.0.mlp.gate_proj",
        "model.layers.1.mlp.shared_experts.gate_proj",
        "model.layers.2.mlp.shared_experts.gate_proj",
    ]


def test_adapters_are_no_model_to_fine_tune(tmp_path, tokens, trained):
    convert(trained, tmp_path / "adapter")
    for path in (trained, tmp_path / "adapter"):
        with pytest.raises(BadInput, match="LoRA adapters"):
            plan(parse_recipe(recipe(tmp_path / "full", path, tokens, lora=None)))


def test_a_strict_merge_takes_the_newest_adapters_or_none(tmp_path, base, tokens, capfd):
    train(recipe(tmp_path / "run", base, tokens, steps=2, checkpoint={"every": 1}))
    newest = tmp_path / "run" / "checkpoints" / "step-00000002"
    next(newest.glob("*.safetensors")).unlink()
    words = ["merge-lora", str(base), str(tmp_path / "run"), str(tmp_path / "merged")]
    assert trilith([*words, "--strict"]) == 4 and newest.name in capfd.readouterr().err
    assert not (tmp_path / "merged").exists()
    with pytest.warns(UserWarning, match=f"{newest.name}.*; using step-00000001"):
        assert trilith(words) == 0
    older = newest.with_name("step-00000001")
    flip_bit(next(older.glob("*.safetensors")), -1)
    assert trilith([*words[:2], str(older), str(tmp_path / "again")]) == 4
    assert not (tmp_path / "again").exists()
