"""What the docs show works: the reader of checkpoints, which knows nothing of this library."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trilith.checkpoints import convert
from trilith.testing import run_parallel
from trilith.testing.runs import TINY_LLAMA, run_recipe, tiny_recipe, write_tokens

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def read() -> Callable[[str, str], torch.Tensor]:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "checkpoints.md").read_text(), re.DOTALL)
    assert "trilith" not in code
    assert len(code.strip().splitlines()) <= 24
    space: dict[str, Callable[[str, str], torch.Tensor]] = {}
    exec(compile(code, "checkpoints.md", "exec"), space)
    return space["read"]


def test_the_reader_reads_what_convert_writes(
    tmp_path: Path, read: Callable[[str, str], torch.Tensor]
) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA))
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", tensor=4, pipeline=3)
    theirs = model.state_dict()
    for ours, name in (
        ("embed.weight", "model.embed_tokens.weight"),
        ("layers.2.mlp.down.weight", "model.layers.2.mlp.down_proj.weight"),
        ("layers.1.attention.qkv.k.weight", "model.layers.1.self_attn.k_proj.weight"),
    ):
        assert torch.equal(read(str(tmp_path / "out"), ours), theirs[name])


def test_the_reader_reads_what_a_run_writes(tmp_path: Path, read: Callable[[str, str], torch.Tensor]) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    raw = tiny_recipe(tmp_path / "run", tokens, steps=1, layout={"tensor": 2, "data": 2, "zero": 1})
    run_parallel(run_recipe, 4, raw)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    moment = read(str(folder), "optimizer.exp_avg_sq.layers.0.mlp.gate_up.up.weight")
    assert moment.shape == read(str(folder), "layers.0.mlp.gate_up.up.weight").shape == (48, 32)
    assert float(moment.min()) >= 0
    assert float(moment.max()) > 0
