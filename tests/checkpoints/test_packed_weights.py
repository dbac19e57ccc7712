"""FP8 weights of DeepSeek-V3 and MXFP4 ones of GPT-OSS are read as the bf16 of transformers."""

import importlib
import json
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import PUBLISHED
from support.families import on_disk, transformers_model
from support.folders import bytes_read
from support.refusals import Refused, refusals
from support.round_trips import RoundTrip, Source, round_trips
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from trilith.checkpoints import convert, load, read_source
from trilith.checkpoints.hugging_face import packed as packed_files
from trilith.checkpoints.hugging_face.packed import BLOCKS, FACTORS, SCALES, unpack
from trilith.cli.app import run
from trilith.parallel_state import Box
from trilith.storage.safetensors_reader import TensorFile

HIGH, WIDE = 8, 16
FP8_PACKING = {
    **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
    "weight_block_size": [HIGH, WIDE],
}


def unpacked_by_hand(numbers, scales):
    factors = scales.repeat_interleave(HIGH, 0).repeat_interleave(WIDE, 1)
    return (numbers.float() * factors[: numbers.shape[0], : numbers.shape[1]]).to(torch.bfloat16)


@cache
def fp8_model():
    """Matrices in FP8; the rows of a latent with its rotated key, 28, are no multiple of a block's."""
    raw = PUBLISHED["deepseek-v3"] | {"num_hidden_layers": 4, "torch_dtype": "bfloat16"}
    model = transformers_model(raw)
    plain = {name: tensor.contiguous() for name, tensor in on_disk(model, model.state_dict()).items()}
    stored = {}
    for name, tensor in plain.items():
        if "_proj" in name:
            rows, columns = tensor.shape
            scales = torch.rand(-(-rows // HIGH), -(-columns // WIDE)) + 0.5
            scales = scales.to(torch.bfloat16 if "k" in name.split(".")[-2] else torch.float32)
            stored[name], stored[name + FACTORS] = (tensor * 8).to(torch.float8_e4m3fn), scales / 8
            plain[name] = unpacked_by_hand(stored[name], stored[name + FACTORS])
        elif not name.endswith("e_score_correction_bias"):
            stored[name] = plain[name] = tensor.to(torch.bfloat16)
        else:
            stored[name] = tensor
    further = "model.layers.4.eh_proj.weight"
    stored |= {further: torch.ones(48, 96).to(torch.float8_e4m3fn), further + FACTORS: torch.ones(6, 6)}
    return SimpleNamespace(shards=[stored], plain=plain, raw=raw, packing=FP8_PACKING)


def pack(shape, *, scales=(118, 125)):
    """Random packed numbers of a tensor (experts, inputs, outputs): all 16 values, several scales."""
    experts, inputs, outputs = shape
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(*scales, (experts, outputs, inputs // 32), dtype=torch.uint8)


@cache
def mxfp4_model():
    """Experts in MXFP4, in two shards which the packed tensors straddle."""
    raw = PUBLISHED["gpt-oss-20b"] | {
        **{"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "torch_dtype": "bfloat16"},
        "layer_types": ["sliding_attention", "full_attention"],
    }
    model = transformers_model(raw).to(torch.bfloat16)
    plain = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    shards = ({}, {})
    for number, (name, tensor) in enumerate([*plain.items()]):
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = pack((*tensor.shape,))
            shards[number % 2][name + BLOCKS], shards[1 - number % 2][name + SCALES] = blocks, scales
            plain[name] = convert_moe_packed_tensors(blocks, scales)
        else:
            shards[number % 2][name] = tensor
    return SimpleNamespace(shards=shards, plain=plain, raw=raw, packing={"quant_method": "mxfp4"})


def write(folder, shards, raw):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", {"format": "pt"})
        return folder
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name, {"format": "pt"})
    index = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def write_packed(folder, model):
    return write(folder, model.shards, model.raw | {"quantization_config": model.packing})


MODELS = {"fp8": fp8_model, "mxfp4": mxfp4_model}


@pytest.fixture(scope="module", params=MODELS)
def packed(request, tmp_path_factory):
    """A folder with packed weights, the model that it holds, and the module that unpacks it."""
    model = MODELS[request.param]()
    folder = write_packed(tmp_path_factory.mktemp("packed"), model)
    return SimpleNamespace(folder=folder, name=request.param, **vars(model))


def test_a_matrix_of_fp8_is_what_transformers_makes_of_it():
    numbers, scales = torch.randn(24, 32).to(torch.float8_e4m3fn), torch.rand(3, 2)
    theirs = Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.bfloat16)
    assert torch.equal(unpacked_by_hand(numbers, scales), theirs)


@pytest.mark.parametrize("scales", [(0, 255), (118, 125)])
def test_every_byte_of_mxfp4_with_every_scale_is_what_transformers_makes_of_it(scales):
    blocks, exponents = pack((2, 64, 512), scales=scales)
    wanted = convert_moe_packed_tensors(blocks, exponents)
    unpacked = unpack(blocks, exponents).transpose(-1, -2)
    assert unpacked.shape == wanted.shape and torch.equal(unpacked, wanted)


def source_of(made):
    return lambda folder: Source(write_packed(folder, made()), made().plain, config=made().raw)


FURTHER = "model.layers.4.eh_proj.weight"
test_packed_weights_come_back_as_bf16 = round_trips(
    RoundTrip(f"{name}-{way}", source, [way, "--to hf"], warns)
    for name, source, warns in (("fp8", source_of(fp8_model), FURTHER), ("mxfp4", source_of(mxfp4_model), ""))
    for way in ("--tensor 1 --verify", "--tensor 2 --pipeline 2")
)


def test_a_model_is_loaded_from_packed_weights(packed, tmp_path):
    """It has the numbers of one that is loaded from the same weights in bf16."""
    plain = load(write(tmp_path / "plain", [packed.plain], packed.raw)).model
    loaded = load(packed.folder).model.state_dict()
    assert [name for name, one in plain.state_dict().items() if not torch.equal(loaded[name], one)] == []


def test_verify_reads_packed_weights_once_and_inspect_names_their_files(packed, capsys):
    with bytes_read(packed.folder) as read:
        assert run(["verify", str(packed.folder)]) == 0
    used = (tensor for shard in packed.shards for key, tensor in shard.items() if "eh_proj" not in key)
    assert read.total() == sum(tensor.nbytes for tensor in used)
    assert run(["inspect", str(packed.folder)]) == 0
    told = capsys.readouterr().out
    assert all(told.count(path.name) == 1 for path in packed.folder.glob("*.safetensors")), told


def test_verify_looks_at_the_numbers_that_packed_weights_stand_for(packed, tmp_path, capsys):
    """A factor of infinity, and an exponent of numbers that bf16 does not hold."""
    shards = [{key: tensor.clone() for key, tensor in shard.items()} for shard in packed.shards]
    shard, key = next((shard, key) for shard in shards for key in shard if key.endswith((FACTORS, SCALES)))
    shard[key].view(-1)[-1] = float("inf") if key.endswith(FACTORS) else 254
    write(tmp_path, shards, packed.raw | {"quantization_config": packed.packing})
    assert run(["verify", str(tmp_path)]) == 2
    name = key.removesuffix(FACTORS).removesuffix(SCALES)
    assert f"{name}: expected finite numbers" in capsys.readouterr().err


BOXES = {
    "fp8": (((0, 0), (28, 48)), ((7, 15), (9, 33)), ((27, 47), (28, 48)), ((5, 3), (5, 9))),
    "mxfp4": (((1, 5, 3), (3, 32, 31)), ((0, 31, 0), (8, 32, 1)), ((7, 0, 20), (8, 31, 64))),
}
NAMES = {
    "fp8": {"layers.3.attention.kv_down.weight": "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"},
    "mxfp4": {
        "layers.1.mlp.experts.gate_up": "model.layers.1.mlp.experts.gate_up_proj",
        "layers.1.mlp.experts.down": "model.layers.1.mlp.experts.down_proj",
    },
}


def test_any_box_of_packed_weights_is_read_alone(packed):
    source = read_source(packed.folder)
    for ours, theirs in NAMES[packed.name].items():
        for start, stop in BOXES[packed.name]:
            box = Box(start, stop)
            assert torch.equal(source.ours[ours].read(box), packed.plain[theirs][box.slices])


def test_a_conversion_of_packed_weights_never_reads_much_at_once(packed, tmp_path, monkeypatch):
    """A block takes the groups of 32 that it touches; what is unpacked at once has a bound of its own."""
    # Of MXFP4 512 numbers, two to a byte, in columns of at least 32, and groups that the block only touches.
    bound, at_once, most_bytes = (
        ("_MULTIPLIED", 256, 256) if packed.name == "fp8" else ("_UNPACKED", 512, 2 * 512)
    )
    sizes, read = [], TensorFile.read

    def counted(file, name, *more, **others):
        stored = read(file, name, *more, **others)
        if stored.dtype == torch.float8_e4m3fn or name.endswith((BLOCKS, SCALES)):
            sizes.append(stored.nbytes)
        return stored

    monkeypatch.setattr(TensorFile, "read", counted)
    monkeypatch.setattr(importlib.import_module("trilith.checkpoints.convert.carry_out"), "BLOCK", 4096)
    monkeypatch.setattr(packed_files, bound, at_once)
    convert(packed.folder, tmp_path / "out", tensor=1)
    assert 0 < max(sizes) <= most_bytes < max(one.nbytes for one in packed.shards[0].values()) // 2
    written = load_file(next((tmp_path / "out").glob("*.safetensors")))
    for ours, theirs in NAMES[packed.name].items():
        assert torch.equal(written[ours], packed.plain[theirs])


def changed(made, change, **packing):
    """Return what writes a packed model's tensors into one file, some changed; ``None`` deletes one."""

    def give(folder):
        model = made()
        tensors = {name: one for shard in model.shards for name, one in shard.items()}
        kept = {name: one for name, one in (tensors | change(tensors)).items() if one is not None}
        write(folder / "hf", [kept], model.raw | {"quantization_config": model.packing | packing})

    return give


MATRIX, STACK = "model.layers.3.self_attn.o_proj.weight", "model.layers.1.mlp.experts.down_proj"
CHANGED = [
    (fp8_model, rf"{MATRIX}{FACTORS}: expected F32 or BF16 \[6, 8\]",
     lambda _: {MATRIX + FACTORS: torch.ones(5, 8)}),
    (fp8_model, rf"{MATRIX}{FACTORS}: expected F32 or BF16 .* found F16",
     lambda tensors: {MATRIX + FACTORS: tensors[MATRIX + FACTORS].half()}),
    (fp8_model, f"{MATRIX}: expected the matrix", lambda _: {MATRIX: None}),
    (fp8_model, "F8_E4M3", lambda _: {MATRIX + FACTORS: None}),
    (fp8_model, "expected a matrix of F8_E4M3", lambda tensors: {MATRIX: tensors[MATRIX].float()}),
    (mxfp4_model, f"{STACK}{SCALES}.*bytes", lambda _: {STACK + SCALES: torch.ones(3, 1, dtype=torch.uint8)}),
    (mxfp4_model, f"{STACK}{BLOCKS}: expected bytes .U8. in groups, found I8",
     lambda tensors: {STACK + BLOCKS: tensors[STACK + BLOCKS].view(torch.int8)}),
    (mxfp4_model, f"{STACK}{SCALES}.*no such tensor", lambda _: {STACK + SCALES: None}),
]  # fmt: skip
PACKINGS = [
    *((fp8_model, {"weight_block_size": size}) for size in (None, [0, 16])),
    *((mxfp4_model, {"quant_method": method}) for method in ("bitsandbytes", "gptq", None)),
]


def cut(folder):
    convert(folder / "hf", folder / "out", tensor=1)


test_weights_in_other_packings_are_refused = refusals([
    *(Refused(says, cut, says, given=changed(made, change)) for made, says, change in CHANGED),
    *(Refused(str(packing), cut, "quantization_config", given=changed(made, lambda _: {}, **packing))
      for made, packing in PACKINGS),
])  # fmt: skip
