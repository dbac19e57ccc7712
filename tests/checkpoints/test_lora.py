"""LoRA adapters between here and PEFT, of experts too: the same modules, logits, gradients and files; merged
into their base, the unmerged model's logits, and other tensors byte for byte.
"""

import importlib
import json
import shutil
from functools import cache
from itertools import product

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import MODELS, TINY_GPT2, TINY_LLAMA, TINY_MIXTRAL, config
from support.families import transformers_model, with_adapters
from support.refusals import Refused, refusals
from support.round_trips import assert_same, weights
from support.short_runs import tiny_recipe, train, whole_tensors
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoModelForCausalLM
from trilith.checkpoints import (
    carry_out,
    convert,
    load,
    load_source,
    plan_merge,
    read_adapter,
    read_source,
    save,
)
from trilith.checkpoints.lora import read_lora
from trilith.cli.app import run
from trilith.layers import gather_logits, vocab_parallel_cross_entropy
from trilith.machine.random_files import write_tokens
from trilith.models import PEFT_PREFIX, LoraConfig, adapted, family_of
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.parallel_state.engine import local_data
from trilith.testing import run_parallel

LLAMA = config("tiny_llama", tie_word_embeddings=False)
GPT2 = config("tiny_gpt2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
TARGETS = {
    "llama": (LLAMA, {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}),
    "llama-all": (LLAMA, {"target_modules": "all-linear", "r": 3, "use_rslora": True}),
    "llama-patterns": (LLAMA, {
        "target_modules": r".*\.(1|2)\..*(o_proj|down_proj|k_proj)", "r": 4,
        "rank_pattern": {r"2\.self_attn\.o_proj": 2, "down_proj": 6}, "alpha_pattern": {"o_proj": 32},
    }),
    "llama-layers": (LLAMA, {
        "target_modules": ["gate_proj", "layers.0.self_attn.q_proj", "up_proj"],
        "exclude_modules": ["layers.2.mlp.up_proj"], "layers_to_transform": [0, 2],
    }),
    "llama-whole-name": (LLAMA, {
        "target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": 1,
    }),
    "gpt2": (GPT2, {"target_modules": ["c_attn"], "r": 4, "lora_alpha": 8}),
    "gpt2-all": (GPT2, {"target_modules": "all-linear", "r": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_pefts_adapter_has_the_same_modules_logits_and_gradients_here(name, tmp_path):
    raw, lora = TARGETS[name]
    base = transformers_model(raw, spread=0.3)
    base.save_pretrained(tmp_path / "base")
    theirs = with_adapters(base, **lora)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load(tmp_path / "base", adapter=tmp_path / "adapter").model
    torch.manual_seed(1)
    ids, labels = torch.randint(131, (2, 20)), torch.randint(131, (2, 20))
    expected = theirs(ids).logits
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    logits = ours(ids)
    vocab_parallel_cross_entropy(logits, labels, 131).mean().backward()
    assert_close(gather_logits(logits, 131), expected, rtol=1e-5, atol=1e-5)
    gradients = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    parameters = dict(ours.named_parameters())
    source = read_adapter(tmp_path / "adapter", read_source(tmp_path / "base"))
    links, _ = source.family.links(source.model_config)
    assert {link.hf for link in links} == gradients.keys()
    assert {link.ours for link in links} == {n for n, p in parameters.items() if p.requires_grad}
    for link in links:
        gradient, wanted = parameters[link.ours].grad, gradients[link.hf][link.hf_box.slices]
        most = float(gradients[link.hf].abs().max())
        assert_close(gradient, wanted, rtol=0, atol=1e-5 * most, msg=link.hf)
    assert not [n for n, p in parameters.items() if not p.requires_grad and p.grad is not None]
    # A config as it is written in a recipe means the same modules.
    family = family_of(raw)
    sites = adapted(family, LoraConfig.model_validate(lora)).sites(family.from_hf(raw))
    named = {key.rpartition(".lora_A")[0] for key in gradients if ".lora_A" in key}
    assert {PEFT_PREFIX + site.name for site in sites} == named


BLOCKS = [{"layers_to_transform": 1}, {"layers_to_transform": [0, 2], "layers_pattern": ["h", "layers"]}]


@torch.no_grad()
@pytest.mark.parametrize(
    ("raw", "blocks"),
    [*product((LLAMA, GPT2), BLOCKS), (TINY_MIXTRAL, {"target_modules": r".*\.1\..*\.[qv]_proj"})],
)
def test_a_choice_of_blocks_is_exported_so_that_peft_takes_the_same(tmp_path, raw, blocks):
    """PEFT refuses a choice of blocks together with all-linear, and beside experts it would take a pattern's
    last words in every block, so the export lists the names.
    """
    theirs = transformers_model(raw, spread=0.3)
    theirs.save_pretrained(tmp_path / "base")
    base = read_source(tmp_path / "base")
    family = adapted(base.family, LoraConfig.model_validate({"r": 3, **blocks}))
    family.check(base.model_config, "lora")
    wanted = blocks.get("layers_to_transform", 1)
    numbers = {site.name.split(".")[2] for site in family.sites(base.model_config)}
    assert numbers == {str(number) for number in (wanted if isinstance(wanted, list) else [wanted])}

    factors = {name: torch.randn(shape) * 0.2 for name, shape in family.links(base.model_config)[1].items()}
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    stated = family.to_peft(base.model_config, str(tmp_path / "base"))
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(stated))
    ids = torch.randint(131, (2, 20))
    plain = theirs(ids).logits
    peft_model = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    names = {name.replace(".default", "") for name, _ in peft_model.named_parameters() if "lora_" in name}
    assert names == {*factors}
    expected = gather_logits(load(tmp_path / "base", adapter=tmp_path / "adapter").model(ids), 131)
    assert_close(peft_model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert float((plain - expected).abs().max()) > 1e-2


BESIDE = {
    f"{key} beside {target}": {"target_modules": target, key: value}
    for key, value in (("layers_to_transform", [1]), ("layers_pattern", "layers"))
    for target in ("all-linear", r".*q_proj")
}
test_a_choice_of_blocks_beside_a_string_of_targets_is_refused = refusals(
    Refused(
        why,
        lambda _, raw=raw: LoraConfig.from_peft({"peft_type": "LORA", **raw}),
        f"{why.split()[0]}: expected absent: peft refuses it",
    )
    for why, raw in BESIDE.items()
)


test_a_config_of_peft_that_names_nothing_or_no_number_is_refused = refusals(
    Refused(
        f"{raw}",
        lambda _, raw=raw: LoraConfig.from_peft({"peft_type": "LORA", **raw}),
        f"^adapter_c.*: {says}",
    )
    for raw, says in (
        ({}, "target_modules: expected names of modules, or a pattern, found none"),
        ({"target_modules": ["a"], "r": 0}, "r: expected greater than or equal to 1, found 0"),
    )
)


@pytest.mark.parametrize("why", BESIDE)
def test_peft_refuses_a_choice_of_blocks_beside_a_string_of_targets(why):
    with pytest.raises(ValueError, match=r"cannot be used when `target_modules` is a str"):
        peft.LoraConfig(**BESIDE[why])


BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OF_EXPERTS = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": BOTH}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with ``base``, the ``run`` of two ranks that share the experts out, and its ``adapter``."""
    folder = tmp_path_factory.mktemp("trained")
    transformers_model(TINY_MIXTRAL).save_pretrained(folder / "base")
    changes = {
        "model": {"config": None, "init_from": str(folder / "base")},
        "layout": {"data": 2, "expert": 2, "zero": 2},
        "dtype": "float32",
        "steps": 2,
    }
    train(tiny_recipe(folder / "run", write_tokens(folder / "tokens"), lora=OF_EXPERTS, **changes))
    convert(folder / "run", folder / "adapter")
    return folder


@torch.no_grad()
def test_a_runs_adapters_are_pefts(trained, tmp_path):
    stated = json.loads((trained / "adapter" / "adapter_config.json").read_text())
    assert stated["target_parameters"] == BOTH
    plain = AutoModelForCausalLM.from_pretrained(trained / "base")
    theirs = peft.PeftModel.from_pretrained(plain, trained / "adapter")
    written = load_file(trained / "adapter" / "adapter_model.safetensors")
    assert_same({n.replace(".default", ""): p for n, p in theirs.named_parameters() if "lora_" in n}, written)
    assert all(float(one.abs().max()) > 0 for name, one in written.items())  # B has moved
    assert read_lora(trained / "run").target_parameters == read_lora(trained / "adapter").target_parameters
    words = ["convert", str(trained / "run"), str(tmp_path / "again"), "--to", "peft", "--verify"]
    assert run(words) == 0
    with pytest.raises(BadInput, match=r"--to hf: .*whole model, found LoRA .*merge-lora BASE"):
        convert(trained / "run", tmp_path / "whole", to="hf")


def factors(folder, layouts):
    """Return the part of each factor that this rank reads from PEFT's folder, in each layout."""
    base = read_source(folder / "base")
    adapter = read_adapter(folder / "adapter", base)
    parts = []
    for layout in layouts:
        state = ParallelState.start(layout)
        model = adapter.family.build(base.model_config, state=state, device="cpu")
        load_source(adapter, model)
        boxes = {name: one.box(layout, state.at) for name, one in adapter.family.declared(model).items()}
        parameters = dict(model.named_parameters())
        parts.append({name: (box, local_data(parameters[name])) for name, box in boxes.items()})
    return parts


def test_pefts_factors_reach_every_layout_bitwise(trained):
    whole = {name: one for name, one in whole_tensors(trained / "run").items() if "optimizer" not in name}
    layouts = [Layout.of(tensor=2), Layout.of(data=2, expert=2)]
    for rank in run_parallel(factors, 2, trained, layouts):
        for parts in rank:
            assert_same(
                {name: one for name, (_, one) in parts.items()},
                {name: whole[name][box.slices] for name, (box, _) in parts.items()},
            )
            assert parts.keys() == whole.keys()


def checked(model, **lora):
    family = family_of(model)
    return lambda _: adapted(family, LoraConfig.model_validate(lora)).check(family.from_hf(model), "lora")


DOWN = {"target_parameters": ["down_proj"]}
test_targets_that_are_not_there_are_refused = refusals(
    Refused("no such stack", checked(TINY_MIXTRAL, target_parameters=["experts.w1"]),
            r"mlp.experts.down_proj, mlp.experts.gate_up"),
    Refused("no experts", checked(TINY_LLAMA, **DOWN), "expected none: no stack of experts"),
    Refused("dropout", checked(TINY_MIXTRAL, **DOWN, lora_dropout=0.1),
            "lora_dropout: expected 0 beside target_parameters"),
    Refused("no linears", checked(GPT2 | {"implementation": "transformers"}),
            r"\[\]: no linear layer of this"),
    Refused("left out", checked(LLAMA, target_modules=["q_proj", "0.mlp.up_proj"], layers_to_transform=1),
            "found '0.mlp.up_proj'. What it names is left out by"),
    Refused("all left out", checked(LLAMA, target_modules=["q_proj"], exclude_modules=["q_proj"]),
            r"found \['q_proj'\]. What it names is left out by"),
    Refused("no targets", checked(TINY_MIXTRAL, target_modules=[]), "target_modules: expected targets among"),
)  # fmt: skip

IDS = torch.randint(131, (2, 20), generator=torch.Generator().manual_seed(3))
#: Both of a stack's matrices: (E, in, out) in gpt_oss, (E, out, in) in granitemoehybrid, whole in the files;
#: an expert at a time in those of mixtral.
STACKS = {
    "r": 3,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
MERGED = {
    "llama": (
        LLAMA,
        {"target_modules": ["q_proj", "down_proj"], "r": 4, "use_rslora": True, "lora_alpha": 6},
    ),
    "gpt2": (TINY_GPT2, {"target_modules": "all-linear", "r": 3, "alpha_pattern": {"c_attn": 12}}),
    **{name: (MODELS[name], STACKS) for name in ("gpt_oss", "granitemoehybrid", "mixtral")},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``made(name)``: PEFT's model, and the folder with its ``base`` and ``adapter``, made once."""

    @cache
    def make(name):
        raw, lora = MERGED[name]
        base, folder = transformers_model(raw), tmp_path_factory.mktemp(name)
        base.save_pretrained(folder / "base")
        model = with_adapters(base, **lora)
        model.save_pretrained(folder / "adapter")
        if name == "gpt2":  # as PEFT did before safetensors
            file = folder / "adapter/adapter_model.safetensors"
            torch.save(load_file(file), file.with_suffix(".bin"))
            file.unlink()
        return model, folder

    return make


def merge(folder, out, base="base", *options):
    return run(["merge-lora", str(folder / base), str(folder / "adapter"), str(out), *options])


@torch.no_grad()
@pytest.mark.parametrize("name", MERGED)
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
    assert bool(stacks) == (MERGED[name][1] is STACKS)
    assert (folder / "base" / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()


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
def test_a_base_of_any_layout_and_a_block_at_a_time_come_to_the_same(made, name, tmp_path, monkeypatch):
    _, folder = made(name)
    convert(folder / "base", tmp_path / "cut", tensor=2, pipeline=2)
    assert merge(folder, tmp_path / "out") == merge(folder, tmp_path / "other", tmp_path / "cut") == 0
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "other"))
    monkeypatch.setattr(importlib.import_module("trilith.checkpoints.convert.carry_out"), "BLOCK", 2000)
    assert merge(folder, tmp_path / "small", "base", "--workers", "3") == 0
    assert_close(weights(tmp_path / "out"), weights(tmp_path / "small"), rtol=1e-6, atol=1e-7)


def spoiled(tensors=lambda name, one: {}, **fields):
    """Return what writes a base and an adapter, some of whose fields and of whose tensors are changed."""

    def give(folder):
        raw, lora = MERGED["llama"]
        base = transformers_model(raw)
        base.save_pretrained(folder / "base")
        with_adapters(base, **lora).save_pretrained(folder / "adapter")
        file, stated = folder / "adapter/adapter_model.safetensors", folder / "adapter/adapter_config.json"
        stated.write_text(json.dumps(json.loads(stated.read_text()) | fields))
        kept = load_file(file)
        first = min(name for name in kept if "lora_A" in name)
        kept |= tensors(first, kept[first])
        save_file({name: one for name, one in kept.items() if one is not None}, file)

    return give


def merging(base="base", adapter="adapter"):
    return lambda folder: carry_out(plan_merge(folder / base, folder / adapter), folder / "out")


def train_the_base(folder):
    model = load(folder / "base", adapter=folder / "adapter").model
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    save(folder / "new" / "m", model)


EXTRA = "base_model.model.lm_head.lora_A.weight"
test_adapters_that_do_not_fit_are_refused = refusals(
    *(Refused(why, merging(), says, given=spoiled(change)) for why, says, change in (
        ("missing", r"lora_A.weight.: expected \[.*\], found no such tensor\. .* target_modules",
         lambda name, one: {name: None}),
        ("extra", "lm_head.lora_A.weight': expected no such tensor.*output layer is not",
         lambda name, one: {EXTRA: one.clone()}),
        ("shape", r"expected \[", lambda name, one: {name: one[:, 1:].clone()}),
        ("nan", "expected finite numbers", lambda name, one: {name: one * float("nan")}),
        ("sums too large", "expected finite sums, found a NaN or an infinity",
         lambda name, one: {name: torch.full_like(one, 3e38)}),
    )),
    *(Refused(why, merging(), says, given=spoiled(**fields)) for why, says, fields in (
        ("rank", r"expected \[", {"r": 5}),
        ("bias", "bias: expected 'none'", {"bias": "all"}),
        ("save", "modules_to_save: .*absent", {"modules_to_save": ["lm_head"]}),
        ("pissa", "init_lora_weights", {"init_lora_weights": "pissa"}),
        ("head", "adapter_config.json: target_modules: .*found lm_head", {"target_modules": ["lm_head"]}),
        ("future", "use_new: expected absent", {"use_new": {"a": 1}}),
    )),
    Refused("a base that is trained too", train_the_base, "expected adapters alone trained, found a weight",
            given=spoiled()),
    *(Refused(why, call, "LoRA adapters", given=spoiled()) for why, call in (
        ("a base is no adapter", merging("base", "base")),
        ("an adapter is no base", merging("adapter")),
        ("no base", lambda folder: load(folder / "adapter")),
        ("a model as adapters", lambda folder: convert(folder / "base", folder / "x", to="peft")),
    )),
)  # fmt: skip


def test_finite_numbers_are_told_without_a_mask(made, tmp_path, monkeypatch):
    """A mask of booleans takes 15 to 30 times as long as two maxima."""
    _, folder = made("llama")
    monkeypatch.setattr(torch, "isfinite", lambda numbers: pytest.fail("it makes a mask"))
    assert merge(folder, tmp_path / "out") == 0
    convert(folder / "base", tmp_path / "cut", tensor=2)
    load(tmp_path / "cut")
