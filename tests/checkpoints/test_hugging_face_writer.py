"""Exported folders: cut as transformers cuts them, read back by transformers and by ourselves."""

import json

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from support.configs import config
from support.families import config_of, transformers_model
from support.round_trips import assert_same
from transformers import AutoModelForCausalLM
from trilith.checkpoints import HFFolder
from trilith.checkpoints.hugging_face.writer import HFFolderWriter, plan_shards
from trilith.parallel_state import Box


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(4, 80))
def test_shards_are_cut_as_hugging_face_cuts_them(rows, most):
    state = {f"t{i}": torch.zeros(n, 2) for i, n in enumerate(rows)}
    theirs = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size=most
    )
    ours = plan_shards({name: ("F32", tuple(t.shape)) for name, t in state.items()}, most)
    assert ours == theirs.filename_to_tensors


@pytest.mark.parametrize("most", [30_000, 10**9])
def test_transformers_reads_what_is_written(tmp_path, most):
    model = transformers_model(config("tiny_llama", tie_word_embeddings=False))
    raw, state = config_of(model), model.state_dict()
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes('{"é": 1}'.encode() * 1000)
    target = tmp_path / "out"
    target.mkdir()
    spec = {name: ("F32", tuple(tensor.shape)) for name, tensor in state.items()}
    writer = HFFolderWriter(target, raw, spec, max_shard_size=most, companions=[tokenizer])
    for name, tensor in reversed(state.items()):
        writer.writers[writer.place[name]].write(name, Box.whole(tuple(tensor.shape)), tensor)
    written = writer.finish()
    assert {one.crc for one in written} == {0}  # nobody asks for a sum, and it is not free

    folder = HFFolder(target)
    assert folder.warnings == []
    assert {name: file.path for name, (file, _) in folder.tensors.items()} == {
        name: writer.writers[writer.place[name]].path for name in state
    }
    assert [path.stat().st_size for path in sorted(target.glob("*.safetensors"))] == [w.size for w in written]
    assert (len(written) > 1) == (most == 30_000)
    assert (target / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert_same(AutoModelForCausalLM.from_pretrained(target).state_dict(), state)

    # byte for byte the index that transformers writes, and the same metadata inside the files
    model.save_pretrained(tmp_path / "theirs", max_shard_size=most)
    index = "model.safetensors.index.json"
    assert (target / index).exists() == (tmp_path / "theirs" / index).exists()
    if (target / index).exists():
        ours, theirs = (json.loads((d / index).read_text()) for d in (target, tmp_path / "theirs"))
        assert ours["metadata"] == theirs["metadata"]
        assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    for path in target.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        assert load_file(path)
