"""Adapters merged into their base: the unmerged model's logits; other tensors byte for byte; refusals."""

import importlib
import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from trilith.checkpoints import convert, read_source
from trilith.cli.app import run

LLAMA = LlamaConfig(
    vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
GPT2 = GPT2Config(
    vocab_size=131, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
)
CASES = {
    "llama": (
        LLAMA,
        {"target_modules": ["q_proj", "down_proj"], "r": 4, "use_rslora": True, "lora_alpha": 6},
    ),
    "gpt2": (GPT2, {"target_modules": "all-linear", "r": 3, "alpha_pattern": {"c_attn": 12}}),
}


@pytest.fixture(params=CASES)
def model(request, tmp_path):
    """Make a PEFT model whose base and adapters lie in ``base`` and ``adapter``."""
    torch.manual_seed(0)
    config, lora = CASES[request.param]
    base = (LlamaForCausalLM if config is LLAMA else GPT2LMHeadModel)(config).eval()
    base.save_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **lora)).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    return theirs


def merge(tmp_path, base="base", out="out", *options):
    return run(["merge-lora", str(tmp_path / base), str(tmp_path / "adapter"), str(tmp_path / out), *options])


def test_the_merged_model_gives_the_unmerged_models_logits(model, tmp_path):
    assert merge(tmp_path) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(131, (2, 20))
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-5, atol=1e-5)
        with model.disable_adapter():
            assert float((model(ids).logits - expected).abs().max()) > 1e-3
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    inside = model.get_base_model().state_dict()
    adapted = {name.rpartition(".base_layer")[0] for name in inside if ".base_layer" in name}
    changed = {name.removesuffix(".weight") for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and changed == adapted
    assert (tmp_path / "base" / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()


def test_a_checkpoint_of_any_layout_is_a_base_too(model, tmp_path):
    convert(tmp_path / "base", tmp_path / "cut", tensor=2, pipeline=2)
    assert merge(tmp_path) == merge(tmp_path, "cut", "other") == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "other"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_stored_format_stays_and_the_sum_is_rounded_once(model, tmp_path):
    weights = {name: w.bfloat16() for name, w in load_file(tmp_path / "base" / "model.safetensors").items()}
    save_file(weights, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    assert merge(tmp_path) == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            key = name.removeprefix("base_model.model.") + ".weight"
            exact = weights[key].double() + module.get_delta_weight("default").double()
            error = (merged[key].double() - exact).abs()
            assert merged[key].dtype == torch.bfloat16
            assert bool((error <= exact.abs() * 2**-8 * 1.001 + 1e-7).all()), key


def test_a_block_at_a_time_comes_to_the_same(model, tmp_path, monkeypatch):
    assert merge(tmp_path) == 0
    budget = importlib.import_module("trilith.checkpoints.convert.memory_budget")
    monkeypatch.setattr(budget, "BLOCK", 1000)
    assert merge(tmp_path, "base", "small", "--workers", "3") == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "small"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-7)


def spoil(tmp_path, how):
    folder = tmp_path / "adapter"
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, raw = load_file(file), json.loads(config.read_text())
    first = next(name for name in sorted(tensors) if "lora_A" in name)
    if how == "missing":
        del tensors[first]
    elif how == "extra":
        tensors["base_model.model.lm_head.lora_A.weight"] = tensors[first].clone()
    elif how == "shape":
        tensors[first] = tensors[first][:, :-1].contiguous()
    elif how == "rank":
        raw["r"] += 1
    elif how == "nan":
        tensors[first][0, 0] = float("nan")
    elif how == "dora":
        raw["use_dora"] = True
    elif how == "bias":
        raw["bias"] = "all"
    elif how == "save":
        raw["modules_to_save"] = ["lm_head"]
    elif how == "pissa":
        raw["init_lora_weights"] = "pissa"
    elif how == "future":
        raw["use_something_new"] = {"a": 1}
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps(raw))


FLAWS = {
    "missing": "expected a tensor, as target_modules says",
    "extra": "lm_head.lora_A.weight: expected no such tensor",
    "shape": "expected [",
    "rank": "expected [",
    "nan": "expected finite numbers",
    "dora": "use_dora: expected absent",
    "bias": "bias: expected 'none'",
    "save": "modules_to_save: expected absent",
    "pissa": "init_lora_weights",
    "future": "use_something_new: expected absent",
}


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_what_does_not_fit_is_refused_and_leaves_nothing(model, tmp_path, capfd):
    good = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir() if path.is_file()}
    for how, words in FLAWS.items():
        for name, data in good.items():
            (tmp_path / "adapter" / name).write_bytes(data)
        spoil(tmp_path, how)
        assert merge(tmp_path) == 2, how
        error = capfd.readouterr().err
        assert words in error and error.count("error: ") == 1, (how, error)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"], how


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_adapters_alone_are_no_model_and_a_model_is_no_adapter(model, tmp_path, capfd):
    base, adapter, out = (str(tmp_path / name) for name in ("base", "adapter", "out"))
    for words in (
        ["inspect", adapter],
        ["merge-lora", base, base, out],
        ["merge-lora", adapter, adapter, out],
    ):
        assert run(words) == 2
        assert "LoRA adapters" in capfd.readouterr().err
    assert run(["convert", str(tmp_path / "base"), str(tmp_path / "x"), "--to", "peft"]) == 2
    assert "a checkpoint of LoRA adapters" in capfd.readouterr().err
    assert read_source(tmp_path / "base").adapter is None
