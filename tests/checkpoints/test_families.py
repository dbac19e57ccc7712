"""Llama's relatives through the files: from Hugging Face to another layout and back is bitwise."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import TINY_LLAMA
from transformers import AutoConfig, AutoModelForCausalLM
from trilith.checkpoints import read_source
from trilith.cli.app import run
from trilith.parallel_state import BadInput

PLAIN = {key: value for key, value in TINY_LLAMA.items() if key not in ("attention_bias", "model_type")}


EXPERTS = {"mixtral": {"num_local_experts": 6}, "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 12}}
EXPERTS |= {"glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 12, "use_qk_norm": True}}
#: As DeepSeek-V3 is, where it differs from GLM-4.5.
EXPERTS["deepseek_v3"] = {
    **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    **{"num_key_value_heads": 4, "moe_intermediate_size": 12, "first_k_dense_replace": 1},
    **{"q_lora_rank": 14, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8},
    "v_head_dim": 8,
}


def correction_biases(model):
    return {name: one for name, one in model.named_buffers() if name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "glm4_moe"])
def test_there_and_through_a_layout_and_back_is_bitwise(kind, tmp_path):
    source, sharded, back = (tmp_path / name for name in ("hf", "sharded", "back"))
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **PLAIN, **EXPERTS.get(kind, {})))
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    for buffer in correction_biases(theirs).values():
        torch.nn.init.normal_(buffer)
    theirs.save_pretrained(source)
    assert run(["convert", str(source), str(sharded), "--tensor", "4", "--pipeline", "3"]) == 0
    assert run(["convert", str(sharded), str(back), "--to", "hf"]) == 0
    assert (source / "model.safetensors").read_bytes() == (back / "model.safetensors").read_bytes()
    again = AutoModelForCausalLM.from_pretrained(back)
    assert type(again) is type(theirs)
    ids = torch.randint(131, (1, 9))
    assert torch.equal(again.eval()(ids).logits, theirs.eval()(ids).logits)


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_correction_biases_stay_fp32_as_in_transformers_and_further_blocks_are_left_out(
    kind, tmp_path, capsys
):
    """One model is in bf16; another is cast to it, and its file has a block that predicts further tokens."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **PLAIN | EXPERTS[kind])
    theirs = AutoModelForCausalLM.from_config(config)
    for buffer in correction_biases(theirs).values():
        torch.nn.init.normal_(buffer)
    theirs.save_pretrained(tmp_path / "fp32")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "bf16")
    tensors = load_file(tmp_path / "fp32" / "model.safetensors")
    more = {
        "model.layers.3.eh_proj.weight": torch.ones(32, 64),
        "model.layers.3.mlp.gate.weight": torch.ones(8),
    }
    save_file(tensors | more, tmp_path / "fp32" / "model.safetensors", {"format": "pt"})
    for source, cast in (("bf16", []), ("fp32", ["--dtype", "bfloat16"])):
        sharded, back = tmp_path / f"{source}-sharded", tmp_path / f"{source}-back"
        assert run(["convert", str(tmp_path / source), str(sharded), "--tensor", "2", "--pipeline", "2"]) == 0
        assert run(["convert", str(sharded), str(back), "--to", "hf", *cast]) == 0
        assert (back / "model.safetensors").read_bytes() == (
            tmp_path / "bf16" / "model.safetensors"
        ).read_bytes()
        assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
    assert "2 tensors of blocks that predict further tokens are not read" in capsys.readouterr().err
    wanted, found = correction_biases(theirs), correction_biases(half)
    assert wanted.keys() == found.keys() and len(wanted) == 2
    assert all(torch.equal(found[name], one) for name, one in wanted.items())

    more = {"model.layers.4.eh_proj.weight": torch.ones(32, 64)}  # the config counts one such block
    save_file(tensors | more, tmp_path / "fp32" / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"model\.layers\.4\.eh_proj\.weight: expected no such tensor"):
        read_source(tmp_path / "fp32")
