"""FP8 checkpoints of DeepSeek-V3 are read as the bf16 numbers that transformers makes of them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import PUBLISHED
from support.families import on_disk, transformers_model
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from trilith.checkpoints import load_model, read_source
from trilith.checkpoints.convert import memory_budget
from trilith.checkpoints.hugging_face import fp8
from trilith.checkpoints.hugging_face.fp8 import SCALES
from trilith.cli.app import run
from trilith.layers import gather_logits
from trilith.parallel_state import BadInput, Box
from trilith.storage.safetensors_reader import TensorFile

HIGH, WIDE = 8, 16
#: The rows of a latent with its rotated key, 28, are no multiple of a block's.
CONFIG = PUBLISHED["deepseek-v3"] | {"num_hidden_layers": 4}
PACKING = {
    **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
    "weight_block_size": [HIGH, WIDE],
}


def by_hand(numbers, scales):
    factors = scales.repeat_interleave(HIGH, 0).repeat_interleave(WIDE, 1)
    return (numbers.float() * factors[: numbers.shape[0], : numbers.shape[1]]).to(torch.bfloat16)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder with FP8 matrices and a block that predicts further tokens; its tensors in bf16."""
    folder, model = tmp_path_factory.mktemp("fp8"), transformers_model(CONFIG)
    plain = {name: tensor.contiguous() for name, tensor in on_disk(model, model.state_dict()).items()}
    stored = {}
    for name, tensor in plain.items():
        if "_proj" in name:
            rows, columns = tensor.shape
            scales = torch.rand(-(-rows // HIGH), -(-columns // WIDE)) + 0.5
            stored[name], stored[name + SCALES] = (tensor * 8).to(torch.float8_e4m3fn), scales / 8
            plain[name] = by_hand(stored[name], stored[name + SCALES])
        elif not name.endswith("e_score_correction_bias"):
            stored[name] = plain[name] = tensor.to(torch.bfloat16)
        else:
            stored[name] = tensor
    further = "model.layers.4.eh_proj.weight"
    stored |= {further: torch.ones(48, 96).to(torch.float8_e4m3fn), further + SCALES: torch.ones(6, 6)}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    said = CONFIG | {"torch_dtype": "bfloat16", "quantization_config": PACKING}
    (folder / "config.json").write_text(json.dumps(said))
    return folder, plain


def test_a_matrix_is_what_transformers_makes_of_it():
    numbers, scales = torch.randn(24, 32).to(torch.float8_e4m3fn), torch.rand(3, 2)
    theirs = Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.bfloat16)
    assert torch.equal(by_hand(numbers, scales), theirs)


@pytest.mark.parametrize(
    "layout", [["--tensor", "1", "--verify"], ["--tensor", "2", "--pipeline", "2"]], ids=str
)
def test_it_is_converted_to_bf16_and_exported_so(packed, layout, tmp_path, capsys):
    folder, wanted = packed
    sharded, back = tmp_path / "sharded", tmp_path / "back"
    assert run(["convert", str(folder), str(sharded), *layout]) == 0
    assert "model.layers.4.eh_proj.weight" in capsys.readouterr().err
    assert run(["convert", str(sharded), str(back), "--to", "hf"]) == 0
    found = load_file(back / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


@torch.no_grad()
def test_a_model_is_loaded_from_it(packed):
    folder, wanted = packed
    model, ids = load_model(folder), torch.randint(503, (2, 20))
    parameters = dict(model.named_parameters())
    assert torch.equal(
        parameters["layers.3.attention.kv_down.weight"].bfloat16(),
        wanted["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"],
    )
    assert bool(torch.isfinite(gather_logits(model(ids), 503)).all())


def test_any_box_of_a_matrix_is_read_alone(packed):
    folder, wanted = packed
    source = read_source(folder)
    links, whole = source.links(), wanted["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"]
    for start, stop in (((0, 0), (28, 48)), ((7, 15), (9, 33)), ((27, 47), (28, 48)), ((5, 3), (5, 9))):
        box = Box(start, stop)
        assert torch.equal(source.read("layers.3.attention.kv_down.weight", box, links), whole[box.slices])


def test_a_conversion_never_reads_much_at_once(packed, tmp_path, monkeypatch):
    folder, _ = packed
    most, read = [0], TensorFile.read

    def counted(file, name, *more, **others):
        found = read(file, name, *more, **others)
        if found.dtype == torch.float8_e4m3fn:
            most[0] = max(most[0], found.nbytes)
        return found

    monkeypatch.setattr(TensorFile, "read", counted)
    monkeypatch.setattr(memory_budget, "BLOCK", 4096)
    monkeypatch.setattr(fp8, "_AT_ONCE", 256)
    assert run(["convert", str(folder), str(tmp_path / "out"), "--tensor", "1"]) == 0
    assert 0 < most[0] <= 256


def test_factors_that_do_not_fit_and_other_packings_are_refused_in_one_line(packed, tmp_path, capsys):
    folder, _ = packed
    tensors, said = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    name = "model.layers.3.self_attn.o_proj.weight"
    for number, (changed, packing, words) in enumerate(
        (
            ({**tensors, name + SCALES: torch.ones(5, 8)}, PACKING, f"{name}{SCALES}: expected F32 [6, 8]"),
            (
                {key: one for key, one in tensors.items() if key != name},
                PACKING,
                f"{name}: expected the matrix",
            ),
            ({key: one for key, one in tensors.items() if key != name + SCALES}, PACKING, "F8_E4M3"),
            ({**tensors, name: tensors[name].float()}, PACKING, "expected a matrix of F8_E4M3"),
            (tensors, PACKING | {"weight_block_size": None}, "quantization_config"),
            (tensors, PACKING | {"weight_block_size": [0, 16]}, "quantization_config"),
        )
    ):
        source = tmp_path / str(number)
        source.mkdir()
        save_file(changed, source / "model.safetensors", {"format": "pt"})
        (source / "config.json").write_text(json.dumps(said | {"quantization_config": packing}))
        assert run(["convert", str(source), str(tmp_path / "out"), "--tensor", "1"]) == 2
        error = capsys.readouterr().err.strip()
        assert words in error and error.count("\n") == 0, error
        with pytest.raises(BadInput):
            read_source(source)
    assert not (tmp_path / "out").exists()
