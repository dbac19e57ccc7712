"""Conversion both ways and between layouts: bit for bit, complete by itself, readable by transformers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.folders import contents
from support.short_runs import run_recipe, tiny_recipe
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from trilith.checkpoints import (
    Manifest,
    convert,
    differences,
    load_model,
    plan_conversion,
    read_source,
    verify,
)
from trilith.checkpoints.hugging_face.writer import plan_shards
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.models import family_of
from trilith.parallel_state import BadCheckpoint, BadInput, Box, Layout, ParallelState
from trilith.storage.safetensors_header import build_header
from trilith.testing import run_parallel

Tensors = dict[str, torch.Tensor]


def llama(tied=False, biases=True):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=131,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            attention_bias=biases,
            mlp_bias=biases,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    return roughened(model)


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=131, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return roughened(GPT2LMHeadModel(config))


def roughened(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.5, 0.3)
    return model


MODELS = {
    "llama": llama,
    "llama-tied": lambda: llama(tied=True, biases=False),
    "gpt2": gpt2,
}


@pytest.fixture
def hf(tmp_path):
    """An untied Llama in fp32, one file, with companions."""
    folder = tmp_path / "hf"
    llama().save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"a": "ü"}\n')
    return folder


def weights(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same(a, b):
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


@pytest.mark.parametrize("shard", ["5GB", "20KB"], ids=["single-file", "index"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_there_and_through_another_layout_and_back_is_bitwise_D6(tmp_path, name, dtype, shard):
    source = tmp_path / "hf"
    MODELS[name]().to(dtype).save_pretrained(source, max_shard_size=shard)
    assert (source / "model.safetensors.index.json").exists() == (shard == "20KB")
    convert(source, tmp_path / "a", tensor=2, pipeline=3)
    convert(tmp_path / "a", tmp_path / "b", tensor=4, pipeline=2, split=[2, 1])
    convert(tmp_path / "b", tmp_path / "c", to="sharded")
    convert(tmp_path / "c", tmp_path / "back")
    assert same(weights(source), weights(tmp_path / "back"))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text())
    generation = (tmp_path / "back" / "generation_config.json").read_bytes()
    assert generation == (source / "generation_config.json").read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_the_export_and_computes_the_same(tmp_path, name):
    model = MODELS[name]().eval()
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "a", tensor=4)
    convert(tmp_path / "a", tmp_path / "back")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())
    ids = torch.randint(131, (2, 20))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
        ours = load_model(tmp_path / "a").eval()(ids)[..., :131]
        assert float((ours - model(ids).logits).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_each_file_is_exactly_the_state_of_its_rank(tmp_path, name):
    MODELS[name]().save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", tensor=4, pipeline=2)
    source = read_source(tmp_path / "hf")
    layout = Layout(tensor=4, pipeline=2)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 8
    assert files[5] == "pipeline-01-of-02.tensor-01-of-04.safetensors"
    for rank, file in enumerate(files):
        state = ParallelState.stand_in(layout, rank)
        model = source.family.build(source.model_config, state=state)
        found = load_file(tmp_path / "out" / file)
        shapes = {key: value.shape for key, value in model.state_dict().items()}
        assert found.keys() == shapes.keys()
        for key, tensor in found.items():
            # Padding of the vocabulary is in memory only.
            assert tensor.shape[1:] == shapes[key][1:]
            assert tensor.shape[0] == shapes[key][0] or key in ("embed.weight", "head.weight")


def test_replicas_are_marked_and_equal_and_owners_cover_once(tmp_path, hf):
    convert(hf, tmp_path / "out", tensor=4, pipeline=2)
    manifest = Manifest.load(tmp_path / "out")
    roles = [part.role for part in manifest.tensors["layers.0.attention.qkv.k.weight"].parts]
    assert roles == ["owner", "replica", "replica", "replica"]  # 2 heads on 4 ranks lie whole on each
    assert all(part.role == "owner" for part in manifest.tensors["layers.0.mlp.down.weight"].parts)
    verify(tmp_path / "out", manifest)
    assert manifest.kind == "weights"


@pytest.mark.parametrize("to", ["sharded", "hf"])
def test_a_place_that_is_taken_is_said_so_and_loses_the_lock_that_a_killed_run_left(tmp_path, hf, to):
    convert(hf, tmp_path / "first", tensor=2)
    convert(tmp_path / "first", tmp_path / "out", to=to)
    before = contents(tmp_path / "out")
    (tmp_path / "out.tmp-lock").touch()
    with pytest.raises(BadInput, match="out: expected a new or empty directory, found one with files in it"):
        convert(tmp_path / "first", tmp_path / "out", to=to)
    assert contents(tmp_path / "out") == before and not (tmp_path / "out.tmp-lock").exists()


def test_companions_travel_byte_for_byte(tmp_path, hf):
    convert(hf, tmp_path / "a", tensor=2)
    convert(tmp_path / "a", tmp_path / "back")
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (hf / name).read_bytes()


def test_a_cast_is_told_in_the_config(tmp_path, hf):
    convert(hf, tmp_path / "half", to="hf", dtype="bfloat16")
    expected = {name: tensor.bfloat16() for name, tensor in weights(hf).items()}
    assert same(weights(tmp_path / "half"), expected)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def change(folder, **changes):
    """Replace tensors of the folder's one file; ``None`` deletes; ``__`` stands for a dot."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})


def reconfigure(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))


NORM = "model__norm__weight"
Q = "model__layers__0__self_attn__q_proj__weight"


def nan():
    return torch.full((32,), float("nan"))


BAD = {
    "C1-missing": (dict([(NORM, None)]), {}, "model.norm.weight"),
    "C2-extra": ({"model__extra__weight": torch.ones(3)}, {}, "model.extra.weight"),
    "C3-shape": ({NORM: torch.ones(31)}, {}, r"model.norm.weight: expected \[32\], found \[31\]"),
    "C5-int8": ({NORM: torch.ones(32, dtype=torch.int8)}, {}, "found I8"),
    "C6-fp8": ({NORM: torch.ones(32).to(torch.float8_e4m3fn)}, {}, "Quantised"),
    "C9-nan": ({NORM: nan()}, {}, "model.norm.weight|norm.weight: expected finite"),
    "C10-inf": ({NORM: nan().nan_to_num(float("inf"))}, {}, "norm.weight: expected finite"),
    "C12-tied-but-differs": ({}, {"tie_word_embeddings": True}, "sha256"),
    "C14-untied-but-absent": ({"lm_head__weight": None}, {}, "lm_head.weight"),
    "C15-biases-not-told": ({}, {"attention_bias": False}, "bias"),
    "C18-zero-size": ({NORM: torch.ones(0)}, {}, "model.norm.weight"),
    "D6-kv-heads-not-told": ({}, {"num_key_value_heads": None}, "k_proj"),
    "D17-more-layers-than-there-are": ({}, {"num_hidden_layers": 4}, "layers.3"),
    "D18-fewer-layers-than-there-are": ({}, {"num_hidden_layers": 2}, "layers.2"),
    "D19-vocabulary": ({}, {"vocab_size": 132}, r"expected \[132, 32\], found \[131, 32\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_weights_that_are_not_those_of_the_config_are_refused(tmp_path, hf, case):
    tensors, config, message = BAD[case]
    change(hf, **tensors)
    reconfigure(hf, **config)
    with pytest.raises(BadInput, match=message) as error:
        convert(hf, tmp_path / "out", tensor=2)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("out*"))


def test_a_hole_in_the_layers_is_refused_C16(tmp_path, hf):
    gone = {name.replace(".", "__"): None for name in weights(hf) if name.startswith("model.layers.1.")}
    change(hf, **gone)
    with pytest.raises(BadInput, match=r"model\.layers\.1\."):
        convert(hf, tmp_path / "out")


def test_names_without_their_prefix_are_refused_with_a_hint_C17(tmp_path, hf):
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in weights(hf).items()},
        hf / "model.safetensors",
    )
    with pytest.raises(BadInput, match="prefix"):
        convert(hf, tmp_path / "out")


def test_the_first_gpt2_s_names_without_prefix_are_read(tmp_path):
    gpt2().save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    old = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(old, path)
    convert(tmp_path / "hf", tmp_path / "a", tensor=2)
    convert(tmp_path / "a", tmp_path / "back")
    back = weights(tmp_path / "back")
    assert all(name.startswith("transformer.") for name in back)
    assert torch.equal(back["transformer.h.0.attn.c_attn.weight"], old["h.0.attn.c_attn.weight"])


def test_nan_passes_only_when_asked_C9(tmp_path, hf):
    change(hf, **{NORM: nan()})
    convert(hf, tmp_path / "out", tensor=2, allow_nonfinite=True)
    convert(tmp_path / "out", tmp_path / "back", allow_nonfinite=True)
    assert bool(weights(tmp_path / "back")["model.norm.weight"].isnan().all())


def test_a_tied_head_that_is_absent_or_repeated_is_accepted_C13(tmp_path):
    llama(tied=True).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    convert(tmp_path / "hf", tmp_path / "a")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    convert(tmp_path / "hf", tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "back")
    assert same(weights(tmp_path / "back"), tensors)


def test_a_cast_that_overflows_is_refused_C8(tmp_path, hf):
    change(hf, **{NORM: torch.full((32,), 1e6)})
    with pytest.raises(BadInput, match="32 that overflow"):
        convert(hf, tmp_path / "out", dtype="float16")
    assert not list(tmp_path.glob("out*"))


def test_a_cast_that_makes_all_of_a_tensor_zero_is_refused(tmp_path, hf):
    change(hf, **{NORM: torch.full((32,), 1e-9)})
    with pytest.raises(BadInput, match=r"32, so that the whole tensor becomes zero.*wider range"):
        convert(hf, tmp_path / "out", dtype="float16")
    assert not list(tmp_path.glob("out*"))
    convert(hf, tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize("to", ["hf", "sharded"])
def test_a_cast_that_makes_some_numbers_zero_says_how_many(tmp_path, hf, to, capsys):
    change(hf, **{NORM: torch.tensor([1.0] * 5 + [1e-9] * 27)})
    words = ["convert", str(hf), str(tmp_path / "out"), "--to", to, "--dtype", "float16"]
    assert run(words) == 0
    said = "".join(capsys.readouterr())
    assert "norm.weight: 27 numbers are too small for the type and became zero" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"tensor": 3}, "found 3", id="E1-heads"),
        pytest.param({"pipeline": 4}, "at most 3", id="E5-pipeline"),
        pytest.param({"pipeline": 2, "split": [1, 1]}, "add up to 3", id="E6-split"),
        pytest.param({"dtype": "int8"}, "--dtype", id="dtype"),
        pytest.param({"to": "hf", "tensor": 2}, "--to hf", id="layout-of-hf"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(tmp_path, hf, arguments, message):
    with pytest.raises(BadInput, match=message):
        convert(hf, tmp_path / "out", **arguments)
    assert not list(tmp_path.glob("out*"))


def test_outputs_that_cannot_be_are_refused(tmp_path, hf):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "full", tmp_path / "file", hf, hf / "inside"):
        with pytest.raises(BadInput):
            convert(hf, bad, tensor=2)


def test_a_checkpoint_of_another_model_does_not_load_G13(tmp_path, hf):
    convert(hf, tmp_path / "a")
    family = family_of(LLAMA_RAW)
    from trilith.checkpoints import load_weights

    config = family.from_hf(LLAMA_RAW)
    model = family.build(config, device="cpu")
    with pytest.raises(BadCheckpoint, match="hidden_size: expected 64, found 32"):
        load_weights(tmp_path / "a", model, family, config)


LLAMA_RAW = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def test_a_flipped_bit_does_not_pass_through_a_reshard_G8(tmp_path, hf):
    convert(hf, tmp_path / "a", tensor=2)
    file = tmp_path / "a" / "pipeline-00-of-01.tensor-01-of-02.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadCheckpoint, match="CRC-32"):
        convert(tmp_path / "a", tmp_path / "b", tensor=4)
    assert not list(tmp_path.glob("b*"))


def test_any_box_of_any_tensor_reads_as_its_slice(tmp_path, hf):
    convert(hf, tmp_path / "a", tensor=2, pipeline=2)
    source, whole = read_source(tmp_path / "a"), weights(hf)
    box = Box((5, 3), (29, 20))
    found = source.read("model.layers.2.self_attn.o_proj.weight", box, source.links(to_hf=True))
    assert torch.equal(found, whole["model.layers.2.self_attn.o_proj.weight"][5:29, 3:20])


def test_a_transposed_square_matrix_has_the_right_shape_and_only_a_comparison_shows_it_C4(tmp_path, hf):
    """No header shows it; `diff` against the expected model does, and so do logits against transformers."""
    shutil.copytree(hf, tmp_path / "wrong")
    tensors, name = weights(hf), "model.layers.1.self_attn.o_proj.weight"
    save_file(tensors | {name: tensors[name].T.contiguous()}, tmp_path / "wrong" / "model.safetensors")
    convert(tmp_path / "wrong", tmp_path / "out", tensor=2)
    (found,) = differences(read_source(hf), read_source(tmp_path / "out"))
    assert found.name == "layers.1.attention.out.weight" and found.elements > 900


TRAINED = [(2, 1), (1, 2), (4, 1), (2, 3), (1, 3)]


@pytest.mark.parametrize("first", TRAINED, ids=str)
@pytest.mark.parametrize("second", [(4, 3), (1, 1)], ids=str)
def test_resharding_there_and_back_is_bitwise_with_moments_D3(trained, tmp_path, first, second):
    for number, (tensor, pipeline) in enumerate((first, second, first)):
        source = trained if not number else tmp_path / str(number - 1)
        convert(source, tmp_path / str(number), to="sharded", tensor=tensor, pipeline=pipeline)
    a, b, origin = (read_source(path) for path in (tmp_path / "0", tmp_path / "2", trained))
    assert not list(differences(a, b)) and not list(differences(origin, b))
    assert sum(name.startswith("optimizer.") for name in b.catalog) == 2 * len(b.catalog) // 3
    assert a.manifest is not None and b.manifest is not None and b.manifest.step == 1
    for name in sorted(path.name for path in (tmp_path / "0").glob("*.safetensors")):
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's checkpoint, written by four ranks."""
    folder = tmp_path_factory.mktemp("trained")
    layout = {"data": 2, "tensor": 2, "zero": 1}
    raw = tiny_recipe(folder / "run", write_tokens(folder / "tokens"), steps=1, layout=layout)
    run_parallel(run_recipe, 4, raw)
    return folder / "run" / "checkpoints" / "step-00000001"


@pytest.mark.parametrize("form", ["to-sharded", "to-hf"])
def test_llama_405b_is_planned_from_its_headers_alone(tmp_path, form):
    """The folder has only the headers of 810 GB in 191 files; the data are holes in sparse files."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    }  # fmt: skip
    family = family_of(config)
    _, shapes = family.links(family.from_hf(config))
    shards = plan_shards({name: ("BF16", shape) for name, shape in shapes.items()})
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight_map = {name: file for file, names in shards.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, names in shards.items():
        header, entries = build_header({name: ("BF16", shapes[name]) for name in names}, {})
        with (tmp_path / file).open("wb") as opened:
            opened.write(header)
            opened.truncate(len(header) + sum(entry.nbytes for entry in entries.values()))
    arguments = {"tensor": 8, "pipeline": 16} if form == "to-sharded" else {"to": "hf"}
    plan = plan_conversion(tmp_path, **arguments)
    assert len(plan.files) == (128 if form == "to-sharded" else len(shards))
    assert 811e9 < plan.nbytes < 813e9
