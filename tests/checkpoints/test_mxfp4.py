"""MXFP4 checkpoints of GPT-OSS are read as the bf16 numbers that transformers makes of them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import PUBLISHED
from support.families import transformers_model
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from trilith.checkpoints import load_model, read_source
from trilith.checkpoints.convert import memory_budget
from trilith.checkpoints.hugging_face import mxfp4
from trilith.checkpoints.hugging_face.mxfp4 import BLOCKS, SCALES, unpack
from trilith.cli.app import run
from trilith.layers import gather_logits
from trilith.parallel_state import BadInput, Box
from trilith.storage.safetensors_reader import TensorFile

SMALLER = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
CONFIG = PUBLISHED["gpt-oss-20b"] | SMALLER | {"layer_types": ["sliding_attention", "full_attention"]}


def pack(shape, *, scales=(118, 125)):
    """Random packed numbers of a tensor (experts, inputs, outputs): all 16 values, several scales."""
    experts, inputs, outputs = shape
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(*scales, (experts, outputs, inputs // 32), dtype=torch.uint8)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder in two shards, which the packed tensors straddle; what its tensors are in bf16."""
    folder = tmp_path_factory.mktemp("packed")
    model = transformers_model(CONFIG).to(torch.bfloat16)
    plain = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    stored = ({}, {})
    for number, (name, tensor) in enumerate(list(plain.items())):
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = pack((*tensor.shape,))
            stored[number % 2][name + BLOCKS], stored[1 - number % 2][name + SCALES] = blocks, scales
            plain[name] = convert_moe_packed_tensors(blocks, scales)
        else:
            stored[number % 2][name] = tensor
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, tensors in zip(names, stored, strict=True):
        save_file(tensors, folder / name, {"format": "pt"})
    index = {key: name for name, tensors in zip(names, stored, strict=True) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    said = CONFIG | {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(said))
    return folder, plain


@pytest.mark.parametrize("scales", [(0, 255), (118, 125)])
def test_every_byte_with_every_scale_is_what_transformers_makes_of_it(scales):
    blocks, exponents = pack((2, 64, 512), scales=scales)
    wanted = convert_moe_packed_tensors(blocks, exponents)
    found = unpack(blocks, exponents).transpose(-1, -2)
    assert found.shape == wanted.shape and torch.equal(found, wanted)


@pytest.mark.parametrize("layout", [["--tensor", "1"], ["--tensor", "2", "--pipeline", "2"]], ids=str)
def test_it_is_converted_to_bf16_and_exported_so(packed, layout, tmp_path):
    folder, wanted = packed
    sharded, back = tmp_path / "sharded", tmp_path / "back"
    assert run(["convert", str(folder), str(sharded), *layout]) == 0
    assert run(["convert", str(sharded), str(back), "--to", "hf"]) == 0
    found = load_file(back / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []
    said = json.loads((back / "config.json").read_text())
    assert "quantization_config" not in said and said["swiglu_limit"] == 7.0


def test_a_model_is_loaded_from_it(packed):
    folder, wanted = packed
    theirs = transformers_model(CONFIG)
    theirs.load_state_dict({name: tensor.float() for name, tensor in wanted.items()})
    ids = torch.randint(503, (2, 20))
    with torch.no_grad():
        found = gather_logits(load_model(folder)(ids), 503)
        assert float((found - theirs(ids).logits).abs().max()) <= 1e-5


def test_any_box_of_a_tensor_is_read_alone(packed):
    folder, wanted = packed
    source = read_source(folder)
    links = source.links()
    for name, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        whole = wanted[f"model.layers.1.mlp.experts.{theirs}"]
        for start, stop in (((1, 5, 3), (3, 32, 31)), ((0, 31, 0), (8, 32, 1)), ((7, 0, 20), (8, 31, 64))):
            box = Box(start, stop)
            read = source.read(f"layers.1.mlp.experts.{name}", box, links)
            assert torch.equal(read, whole[box.slices])


def test_a_conversion_never_reads_much_at_once(packed, tmp_path, monkeypatch):
    """A block takes the groups of 32 that it touches; what is unpacked at once has a bound of its own."""
    folder, wanted = packed
    most, read = [0], TensorFile.read

    def counted(file, name, *more, **others):
        found = read(file, name, *more, **others)
        if name.endswith((BLOCKS, SCALES)):
            most[0] = max(most[0], found.nbytes)
        return found

    monkeypatch.setattr(TensorFile, "read", counted)
    monkeypatch.setattr(memory_budget, "BLOCK", 4096)
    monkeypatch.setattr(mxfp4, "_AT_ONCE", 512)
    assert run(["convert", str(folder), str(tmp_path / "out"), "--tensor", "1"]) == 0
    # 512 numbers in columns of at least 32, two to a byte, and groups that the block only touches.
    assert 0 < most[0] <= 2 * 512 < wanted["model.layers.0.mlp.experts.down_proj"][0].nbytes // 2
    written = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert torch.equal(written["layers.1.mlp.experts.down"], wanted["model.layers.1.mlp.experts.down_proj"])


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", None])
def test_other_packings_are_refused_in_one_line(packed, method, tmp_path, capsys):
    folder, _ = packed
    source = tmp_path / "source"
    source.mkdir()
    for path in folder.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    said = json.loads((folder / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(said | {"quantization_config": {"quant_method": method}}))
    assert run(["convert", str(source), str(tmp_path / "out"), "--tensor", "1"]) == 2
    error = capsys.readouterr().err.strip()
    assert "quantization_config" in error and error.count("\n") == 0
    assert not (tmp_path / "out").exists()


def test_scales_that_are_missing_or_of_another_shape_are_refused(packed, tmp_path):
    folder, _ = packed
    shards = sorted(folder.glob("*.safetensors"))
    tensors = load_file(shards[0]) | load_file(shards[1])
    name = "model.layers.1.mlp.experts.down_proj"
    for number, (changed, flaw) in enumerate(
        (
            ({**tensors, name + SCALES: tensors[name + SCALES][:, :1].clone()}, "bytes"),
            ({key: one for key, one in tensors.items() if key != name + SCALES}, "no such tensor"),
        )
    ):
        source = tmp_path / str(number)
        source.mkdir()
        save_file(changed, source / "model.safetensors", {"format": "pt"})
        (source / "config.json").write_bytes((folder / "config.json").read_bytes())
        with pytest.raises(BadInput, match=f"{name}{SCALES}.*{flaw}"):
            read_source(source)
