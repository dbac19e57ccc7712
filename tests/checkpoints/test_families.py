"""Llama's relatives through the files: from Hugging Face to another layout and back is bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trilith.cli.app import run
from trilith.testing.runs import TINY_LLAMA

PLAIN = {key: value for key, value in TINY_LLAMA.items() if key not in ("attention_bias", "model_type")}


EXPERTS = {"mixtral": {"num_local_experts": 6}, "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 12}}


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_there_and_through_a_layout_and_back_is_bitwise(kind: str, tmp_path: Path) -> None:
    source, sharded, back = (tmp_path / name for name in ("hf", "sharded", "back"))
    torch.manual_seed(0)
    theirs: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **PLAIN, **EXPERTS.get(kind, {}))
    )
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    theirs.save_pretrained(source)
    assert run(["convert", str(source), str(sharded), "--tensor", "4", "--pipeline", "3"]) == 0
    assert run(["convert", str(sharded), str(back), "--to", "hf"]) == 0
    assert (source / "model.safetensors").read_bytes() == (back / "model.safetensors").read_bytes()
    again: Any = AutoModelForCausalLM.from_pretrained(back)
    assert type(again) is type(theirs)
    ids = torch.randint(131, (1, 9))
    assert torch.equal(again.eval()(ids).logits, theirs.eval()(ids).logits)
