"""Adapters merged into their base: the unmerged model's logits; other tensors byte for byte; refusals."""

import importlib
import json
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import MODELS as FAMILIES
from support.configs import TINY_GPT2, config
from support.families import transformers_model, with_adapters
from support.refusals import Refused, refusals
from support.round_trips import assert_same, weights
from torch.testing import assert_close
from transformers import AutoModelForCausalLM
from trilith.checkpoints import carry_out, convert, load, plan_merge, read_source
from trilith.cli.app import run

IDS = torch.randint(131, (2, 20), generator=torch.Generator().manual_seed(3))
#: Both of a stack's matrices: (E, in, out) in gpt_oss, (E, out, in) in granitemoehybrid, whole in the files.
STACKS = {
    "r": 3,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
MODELS = {
    "llama": (
        config("tiny_llama", tie_word_embeddings=False),
        {"target_modules": ["q_proj", "down_proj"], "r": 4, "use_rslora": True, "lora_alpha": 6},
    ),
    "gpt2": (TINY_GPT2, {"target_modules": "all-linear", "r": 3, "alpha_pattern": {"c_attn": 12}}),
    "gpt_oss": (FAMILIES["gpt_oss"], STACKS),
    "granitemoehybrid": (FAMILIES["granitemoehybrid"], STACKS),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``made(name)``: PEFT's model, and the folder with its ``base`` and ``adapter``, made once."""

    @cache
    def make(name):
        raw, lora = MODELS[name]
        base, folder = transformers_model(raw), tmp_path_factory.mktemp(name)
        base.save_pretrained(folder / "base")
        model = with_adapters(base, **lora)
        model.save_pretrained(folder / "adapter")
        return model, folder

    return make


def merge(folder, out, base="base", *options):
    return run(["merge-lora", str(folder / base), str(folder / "adapter"), str(out), *options])


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_the_merged_model_gives_the_unmerged_models_logits(made, name, tmp_path):
    model, folder = made(name)
    assert merge(folder, tmp_path / "out") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    expected = model(IDS).logits
    assert_close(merged(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        assert float((model(IDS).logits - expected).abs().max()) > 1e-3
    before, after = weights(folder / "base"), weights(tmp_path / "out")
    inside = model.get_base_model().state_dict()
    sites = {name.split(".base_layer")[0] for name in inside if ".base_layer" in name}
    changed = {name.removesuffix(".weight") for name in before if not torch.equal(before[name], after[name])}
    stacks = {name for name in changed if ".experts." in name or "moe." in name}
    assert before.keys() == after.keys()
    assert changed - stacks == {site for site in sites if ".experts" not in site}
    assert bool(stacks) == (MODELS[name][1] is STACKS)
    assert (folder / "base" / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_checkpoint_of_any_layout_is_a_base_too(made, name, tmp_path):
    _, folder = made(name)
    convert(folder / "base", tmp_path / "cut", tensor=2, pipeline=2)
    assert merge(folder, tmp_path / "out") == merge(folder, tmp_path / "other", tmp_path / "cut") == 0
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "other"))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_stored_format_stays_and_the_sum_is_rounded_once(made, name, tmp_path):
    model, folder = made(name)
    shutil.copytree(folder, tmp_path / "half")
    stored = {name: weight.bfloat16() for name, weight in weights(folder / "base").items()}
    save_file(stored, tmp_path / "half" / "base" / "model.safetensors", metadata={"format": "pt"})
    assert merge(tmp_path / "half", tmp_path / "out") == 0
    merged = weights(tmp_path / "out")
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            key = name.removeprefix("base_model.model.") + ".weight"
            exact = stored[key].double() + module.get_delta_weight("default").detach().double()
            error = (merged[key].double() - exact).abs()
            assert merged[key].dtype == torch.bfloat16
            assert bool((error <= exact.abs() * 2**-8 * 1.001 + 1e-7).all()), key


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_block_at_a_time_comes_to_the_same(made, name, tmp_path, monkeypatch):
    _, folder = made(name)
    assert merge(folder, tmp_path / "out") == 0
    monkeypatch.setattr(importlib.import_module("trilith.checkpoints.convert.carry_out"), "BLOCK", 2000)
    assert merge(folder, tmp_path / "small", "base", "--workers", "3") == 0
    assert_close(weights(tmp_path / "out"), weights(tmp_path / "small"), rtol=1e-6, atol=1e-7)


def spoiled(tensors=None, **fields):
    def give(folder):
        raw, lora = MODELS["llama"]
        base = transformers_model(raw)
        base.save_pretrained(folder / "base")
        with_adapters(base, **lora).save_pretrained(folder / "adapter")
        file, stated = (
            folder / "adapter" / f"adapter_{name}" for name in ("model.safetensors", "config.json")
        )
        stated.write_text(json.dumps(json.loads(stated.read_text()) | fields))
        kept = load_file(file)
        first = next(name for name in sorted(kept) if "lora_A" in name)
        kept |= {} if tensors is None else tensors(first, kept[first])
        kept = {name: one for name, one in kept.items() if one is not None}
        save_file(kept, file, metadata={"format": "pt"})

    return give


def merging(base="base", adapter="adapter"):
    return lambda folder: carry_out(plan_merge(folder / base, folder / adapter), folder / "out")


NAN, EXTRA = float("nan"), "base_model.model.lm_head.lora_A.weight"
test_adapters_that_do_not_fit_are_refused = refusals(
    Refused(
        "missing",
        merging(),
        r"lora_A.weight.: expected \[.*\], found no such tensor\. .* target_modules",
        given=spoiled(lambda name, one: {name: None}),
    ),
    Refused(
        "extra",
        merging(),
        "lm_head.lora_A.weight': expected no such tensor",
        given=spoiled(lambda name, one: {EXTRA: one.clone()}),
    ),
    Refused("shape", merging(), r"expected \[", given=spoiled(lambda name, one: {name: one[:, 1:].clone()})),
    Refused("nan", merging(), "expected finite numbers", given=spoiled(lambda name, one: {name: one * NAN})),
    Refused("rank", merging(), r"expected \[", given=spoiled(r=5)),
    Refused("dora", merging(), "use_dora: expected absent", given=spoiled(use_dora=True)),
    Refused("bias", merging(), "bias: expected 'none'", given=spoiled(bias="all")),
    Refused("save", merging(), "modules_to_save: .*absent", given=spoiled(modules_to_save=["lm_head"])),
    Refused("pissa", merging(), "init_lora_weights", given=spoiled(init_lora_weights="pissa")),
    Refused("future", merging(), "use_new: expected absent", given=spoiled(use_new={"a": 1})),
    *(
        Refused(why, call, "LoRA adapters", given=spoiled())
        for why, call in (
            ("adapters are no model", lambda folder: read_source(folder / "adapter")),
            ("a base is no adapter", merging("base", "base")),
            ("an adapter is no base", merging("adapter")),
            ("a model as adapters", lambda folder: convert(folder / "base", folder / "x", to="peft")),
        )
    ),
)


def test_finite_numbers_are_told_without_a_mask(made, tmp_path, monkeypatch):
    """A mask of booleans takes 15 to 30 times as long as two maxima."""
    _, folder = made("llama")
    monkeypatch.setattr(torch, "isfinite", lambda numbers: pytest.fail("it makes a mask"))
    assert merge(folder, tmp_path / "out") == 0
    convert(folder / "base", tmp_path / "cut", tensor=2)
    load(tmp_path / "cut")
