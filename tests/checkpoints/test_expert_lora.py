"""Adapters on stacks of experts: through files bit for bit, merged, and back in PEFT the same model."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.configs import MODELS, TINY_LLAMA, TINY_MIXTRAL
from support.families import transformers_model
from support.short_runs import tiny_recipe, train, whole_tensors
from transformers import AutoModelForCausalLM
from trilith.checkpoints import convert, load_source, read_adapter, read_source
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.models import LoraConfig, adapted, family_of
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.parallel_state.engine import local_data
from trilith.testing import run_parallel

BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LORA = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": [*BOTH]}
IDS = torch.randint(131, (2, 20), generator=torch.Generator().manual_seed(3))


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
    train(tiny_recipe(folder / "run", write_tokens(folder / "tokens"), lora=LORA, **changes))
    convert(folder / "run", folder / "adapter")
    return folder


def with_peft(folder, adapter="adapter"):
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    return peft.PeftModel.from_pretrained(base, folder / adapter).eval()


@torch.no_grad()
def test_a_runs_adapters_are_pefts_and_merged_they_give_its_logits(trained, tmp_path):
    said = json.loads((trained / "adapter" / "adapter_config.json").read_text())
    assert said["target_parameters"] == [*BOTH]
    theirs = with_peft(trained)
    written = load_file(trained / "adapter" / "adapter_model.safetensors")
    parameters = {n.replace(".default", ""): p for n, p in theirs.named_parameters() if "lora_" in n}
    assert parameters.keys() == written.keys()
    assert all(torch.equal(parameters[name], written[name]) for name in written)
    assert all(float(one.abs().max()) > 0 for name, one in written.items())  # B has moved
    base, adapter, out = (str(one) for one in (trained / "base", trained / "adapter", tmp_path / "merged"))
    assert run(["merge-lora", base, adapter, out]) == 0
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    expected = theirs(IDS).logits
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    with theirs.disable_adapter():
        assert float((theirs(IDS).logits - expected).abs().max()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("model", ["gpt_oss", "granitemoehybrid"])  # (E, in, out) and (E, out, in)
def test_stacks_that_lie_whole_in_the_files_are_merged_too(model, tmp_path):
    row = MODELS[model]
    transformers_model(row).save_pretrained(tmp_path / "base")
    both = ["experts.gate_up_proj", "experts.down_proj"]
    lora = {**LORA, "target_modules": ["q_proj", "o_proj"], "target_parameters": both}
    theirs = peft.get_peft_model(transformers_model(row), peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    names = ("base", "adapter", "merged")
    assert run(["merge-lora", *(str(tmp_path / name) for name in names)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    expected = theirs.eval()(IDS).logits
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    with theirs.disable_adapter():
        assert float((theirs(IDS).logits - expected).abs().max()) > 1e-1


def held(folder, layout):
    """Return the part of each factor that this rank reads from PEFT's folder."""
    state = ParallelState.start(layout)
    base = read_source(folder / "base")
    adapter = read_adapter(folder / "adapter", base)
    model = adapter.family.build(base.model_config, state=state, device="cpu")
    load_source(adapter, model)
    stated, parameters = adapter.family.declared(model), dict(model.named_parameters())
    return {name: (one.box(layout, state.at), local_data(parameters[name])) for name, one in stated.items()}


def test_pefts_factors_reach_every_layout_bitwise(trained):
    whole = {name: one for name, one in whole_tensors(trained / "run").items() if "optimizer" not in name}
    for layout in (Layout.of(tensor=2), Layout.of(data=2, expert=2)):
        for rank in run_parallel(held, 2, trained, layout):
            assert rank.keys() == whole.keys()
            assert [n for n, (box, one) in rank.items() if not torch.equal(one, whole[n][box.slices])] == []


@pytest.mark.parametrize(
    ("model", "lora", "words"),
    [
        (TINY_MIXTRAL, {"target_parameters": ["experts.w1"]}, r"mlp.experts.down_proj, mlp.experts.gate_up"),
        (TINY_LLAMA, {"target_parameters": ["down_proj"]}, "expected none: no stack of experts"),
        (
            TINY_MIXTRAL,
            {"target_parameters": ["down_proj"], "lora_dropout": 0.1},
            "lora_dropout: expected 0 beside target_parameters",
        ),
        (TINY_MIXTRAL, {"target_modules": []}, "target_modules: expected targets among"),
    ],
)
def test_stacks_that_are_not_there_are_refused(model, lora, words):
    family = family_of(model)
    with pytest.raises(BadInput, match=words):
        adapted(family, LoraConfig.model_validate(lora)).check(family.from_hf(model), "lora")
