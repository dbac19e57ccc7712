"""Checkpoints of other projects that cannot be used: damaged, incomplete, quantised, or of another model."""

import json
import pickle
import shutil

import pytest
import torch
from forms import WEIGHTS, save
from safetensors.torch import load_file, save_file
from trilith.checkpoints import convert, read_foreign, read_source
from trilith.cli.app import run
from trilith.parallel_state import BadCheckpoint, BadInput


def flipped(folder, where):
    """Change one bit of a weight in some file of a checkpoint."""
    for path in folder.iterdir():
        raw = bytearray(path.read_bytes())
        if (at := raw.find(where)) >= 0:
            raw[at] ^= 1
            path.write_bytes(raw)
            return
    raise AssertionError("no such bytes")


def test_a_flipped_bit_of_a_weight_is_noticed_and_nothing_is_written(made, tmp_path):
    norm = load_file(made / "hf" / WEIGHTS)["model.norm.weight"].numpy().tobytes()
    for form in ("titan", "bin"):
        shutil.copytree(made / form, tmp_path / form)
        flipped(tmp_path / form, norm[:16])
        config = None if form == "bin" else made / "hf"
        with pytest.raises(BadCheckpoint, match=r"CRC-32.*altered or damaged"):
            convert(tmp_path / form, tmp_path / "out", config=config, to="hf")
        assert not (tmp_path / "out").exists()
    assert run(["verify", str(tmp_path / "titan"), "--config", str(made / "hf")]) == 4
    assert run(["verify", str(tmp_path / "bin")]) == 4


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("titan", {"num_hidden_layers": 3}, r"model\.layers\.2\..*9 of 30 missing"),
        ("titan", {"num_hidden_layers": 1}, r"layers\.1\..*expected no such tensor"),
        ("titan", {"hidden_size": 32}, r"tok_embeddings.*\[37, 32\].*\[37, 16\]"),
        (
            "llama3",
            {"num_hidden_layers": 3},
            r"num_hidden_layers: expected 2, as n_layers in .*params\.json says, found 3",
        ),
        ("llama3", {"rms_norm_eps": 1e-5}, r"rms_norm_eps: expected .*as norm_eps in .*params\.json says"),
        ("llama3", {"rope_scaling": None}, r"rope_scaling: expected True, as use_scaled_rope"),
        ("model.pt", {"vocab_size": 40}, r"embed_tokens.*\[40, 16\].*\[37, 16\]"),
    ],
)
def test_a_config_of_another_model_is_refused_by_both_names(form, change, message, made, tmp_path):
    said = json.loads((made / "hf" / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(BadInput, match=message):
        convert(made / form, tmp_path / "out", config=tmp_path, to="hf")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_states_nothing_about_its_model_gets_a_warning(made, tmp_path):
    """The shapes fit twice as many heads of half the size, and the rows would be put in a wrong order."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2}
    said = json.loads((made / "hf" / "config.json").read_text()) | heads
    (tmp_path / "config.json").write_text(json.dumps(said))
    for form in ("titan", "model.pt"):
        warnings = read_source(made / form, config=tmp_path).warnings
        assert [line for line in warnings if "states nothing about the model" in line], form
    warnings = read_source(made / "llama3", config=made / "hf").warnings
    assert not [line for line in warnings if "states nothing" in line]


def test_a_checkpoint_without_its_config_or_with_one_too_many_is_refused(made, tmp_path):
    with pytest.raises(BadInput, match="--config with a Hugging Face folder"):
        convert(made / "titan", tmp_path / "out")
    with pytest.raises(BadInput, match="Leave out --config"):
        convert(made / "bin", tmp_path / "out", config=made / "hf")
    with pytest.raises(BadInput, match=r"names.*titan"):
        convert(made / "titan", tmp_path / "out", config=made / "hf", names="nothing")


def test_a_missing_chunk_or_part_is_refused(made, tmp_path):
    shutil.copytree(made / "titan", tmp_path / "titan")
    (tmp_path / "titan" / "__1_0.distcp").unlink()
    with pytest.raises(BadInput, match=r"__1_0\.distcp"):
        convert(tmp_path / "titan", tmp_path / "out", config=made / "hf")
    shutil.copytree(made / "titan", tmp_path / "short")
    cut = tmp_path / "short" / "__1_0.distcp"
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(BadInput, match=r"__1_0\.distcp: .*found a file of .*cut short"):
        convert(tmp_path / "short", tmp_path / "out", config=made / "hf")
    shutil.copytree(made / "llama2", tmp_path / "llama2")
    (tmp_path / "llama2" / "consolidated.01.pth").unlink()
    with pytest.raises(BadInput, match=r"wo\.weight.*16 columns.*8 in 1 parts.*after consolidated\.00"):
        convert(tmp_path / "llama2", tmp_path / "out", config=made / "hf")


@pytest.mark.parametrize(("kept", "said"), [([0], "owned by nobody"), ([0, 1, 1], "owned 2 times")])
def test_a_metadata_that_lists_a_chunk_never_or_twice_is_refused(kept, said, made, tmp_path):
    shutil.copytree(made / "titan", tmp_path / "titan")
    path = tmp_path / "titan" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    chunks = metadata.state_dict_metadata["tok_embeddings.weight"].chunks
    chunks[:] = [chunks[number] for number in kept]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadInput, match=said):
        read_foreign(tmp_path / "titan")


def test_compressed_chunks_and_steps_that_differ_between_weights_are_refused(made, tmp_path):
    shutil.copytree(made / "titan", tmp_path / "packed")
    path = tmp_path / "packed" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadInput, match="without storage transforms"):
        read_foreign(tmp_path / "packed")
    hf = load_file(made / "hf" / WEIGHTS)
    state = {
        name: {"exp_avg": one, "exp_avg_sq": one, "step": torch.tensor(float(number > 3))}
        for number, (name, one) in enumerate(hf.items())
    }
    save({"model": hf, "optim": {"state": state}}, tmp_path / "steps")
    with pytest.raises(BadInput, match="as many updates of every weight"):
        read_foreign(tmp_path / "steps")


def test_quantised_forms_are_refused_by_name(made, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadInput, match="GGUF"):
        convert(tmp_path / "model.gguf", tmp_path / "out", config=made / "hf")
    said = json.loads((made / "hf" / "config.json").read_text())
    for method in ("awq", "gptq"):
        folder = tmp_path / method
        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps(said | {"quantization_config": {"quant_method": method}})
        )
        save_file({"a": torch.ones(1)}, folder / WEIGHTS)
        with pytest.raises(BadInput, match=f"quantization_config.*{method}.*Take the model"):
            convert(folder, tmp_path / "out")
