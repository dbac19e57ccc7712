"""Conversion both ways and between layouts: bit for bit, complete by itself, or refused in one line."""

import json
import shutil
import time
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import MODELS as FAMILIES
from support.configs import TINY_GPT2, config
from support.damage import flip_bit
from support.families import transformers_model
from support.folders import contents
from support.refusals import Refused, refusals
from support.round_trips import RoundTrip, Source, round_trips, weights
from support.short_runs import tiny_recipe, train
from trilith.checkpoints import (
    Manifest,
    convert,
    convert_to_dcp,
    differences,
    load,
    plan_conversion,
    read_source,
)
from trilith.checkpoints.hugging_face.writer import plan_shards
from trilith.cli.app import run
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.models import family_of, published_size
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.storage.safetensors_header import build_header
from trilith.storage.strict_json import StoredFile

LLAMA = config("tiny_llama", tie_word_embeddings=False, mlp_bias=True)
MODELS = {"llama": LLAMA, "llama-tied": config("tiny_llama", attention_bias=False), "gpt2": TINY_GPT2}
WEIGHTS = "model.safetensors"
ONE_FILE, SEVERAL = "5GB", "20KB"


def edit(folder, tensors):
    """Replace tensors of the folder's one file; ``None`` deletes one."""
    kept = {
        name: tensor for name, tensor in (load_file(folder / WEIGHTS) | tensors).items() if tensor is not None
    }
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


def saved(raw, dtype, shard):
    """Return what writes a model's folder as transformers does, and a file beside the weights."""

    def write(folder):
        transformers_model(raw).to(dtype).save_pretrained(folder, max_shard_size=shard)
        assert (folder / f"{WEIGHTS}.index.json").exists() == (shard == SEVERAL)
        (folder / "tokenizer_config.json").write_text('{"a": "ü"}\n')
        return Source(folder)

    return write


@cache
def with_router_biases(kind, dtype):
    """Return what writes a model that comes back in bf16 but for its routers' biases, which stay fp32."""

    def write(folder):
        transformers_model(FAMILIES[kind]).save_pretrained(folder / "float32")
        biases = "e_score_correction_bias"
        wanted = {
            name: tensor if name.endswith(biases) else tensor.bfloat16()
            for name, tensor in weights(folder / "float32").items()
        }
        assert any(name.endswith(biases) for name in wanted)
        shutil.copytree(folder / "float32", folder / "bfloat16")
        edit(folder / "bfloat16", wanted)
        stated = json.loads((folder / "float32" / "config.json").read_text()) | {"dtype": "bfloat16"}
        (folder / "bfloat16" / "config.json").write_text(json.dumps(stated))
        further = f"model.layers.{FAMILIES[kind]['num_hidden_layers']}."
        unread = (f"{further}eh_proj.weight", f"{further}x", "model.layers.0.self_attn.rotary_emb.inv_freq")
        edit(folder / "float32", {name: torch.ones(8) for name in unread})
        return Source(folder / dtype, wanted, config=stated)

    return write


def trained(folder):
    layout = {"data": 2, "tensor": 2, "zero": 1}
    train(tiny_recipe(folder / "run", write_tokens(folder / "tokens"), steps=1, layout=layout))
    source = Source(folder / "run" / "checkpoints" / "step-00000001")
    names = weights(source.folder).keys()
    assert 3 * sum(name.startswith("optimizer.") for name in names) == 2 * len(names)
    return source


def first_gpt2_names(folder):
    """Write the names of the first GPT-2, which have no prefix, and a mask."""
    write_hf_folder(folder / "hf", TINY_GPT2)
    wanted = weights(folder / "hf")
    old = {name.removeprefix("transformer."): tensor for name, tensor in wanted.items()}
    save_file(old | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, folder / "hf" / WEIGHTS)
    return Source(folder / "hf", wanted)


def repeated_head(folder):
    write_hf_folder(folder / "hf", MODELS["llama-tied"])
    tensors = weights(folder / "hf")
    assert "lm_head.weight" not in tensors
    edit(folder / "hf", {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    return Source(folder / "hf", tensors)


def trained_through(first, second, *, slow=False):
    """Go to one layout, to a second, and to the first again: its files have the same bytes as before."""
    ways = [f"--to sharded --tensor {tensor} --pipeline {pipeline}" for tensor, pipeline in (first, second)]
    return RoundTrip(f"D3-{first}-{second}", trained, [*ways, ways[0]], slow=slow)


#: Layouts of tensor and pipeline ranks, and two others: of those in FIRST the first is in every run.
AGAIN = {
    (2, 1): [(4, 3), (1, 1)],
    (1, 2): [(1, 1), (4, 3)],
    (4, 1): [(1, 1), (4, 3)],
    (2, 3): [(4, 3), (1, 1)],
    (1, 3): [(1, 1), (4, 3)],
}
#: Those that the default suite begins with: an axis each, and both.
FIRST = {(2, 1), (1, 2), (2, 3)}
THROUGH = ["--tensor 2 --pipeline 3", "--tensor 4 --pipeline 2 --split 2,1", "--to sharded", "--to hf"]
test_there_and_through_another_layout_and_back_is_bitwise_D6 = round_trips(
    # Every run has each model in each dtype, each in one file and in several, and each dtype so.
    *(RoundTrip(f"D6-{name}-{str(dtype)[6:]}-{'one file' if shard == ONE_FILE else 'index'}",
                saved(raw, dtype, shard), THROUGH,
                slow=((dtype is torch.bfloat16) + (shard == ONE_FILE) + (name == "llama")) % 2 == 0)
      for name, raw in MODELS.items()
      for dtype in (torch.float32, torch.bfloat16) for shard in (ONE_FILE, SEVERAL)),
    # Vocabulary 131 takes 256 rows on 2 ranks, 384 on 3.
    RoundTrip(
        "over three ranks",
        saved(config("tiny_llama_of_12_heads"), torch.float32, ONE_FILE),
        ["--tensor 2", "--tensor 3", "--to hf"],
    ),
    RoundTrip("the first GPT-2's names", first_gpt2_names, ["--tensor 2", "--to hf"]),
    RoundTrip("C13-a tied head that is repeated", repeated_head, ["--to sharded", "--to hf"]),
    *(RoundTrip(f"router-biases-{kind}-{dtype}", with_router_biases(kind, dtype),
                ["--tensor 2 --pipeline 2", "--to hf --dtype bfloat16"], warns)
      for kind in ("glm4_moe", "deepseek_v3")
      for dtype, warns in (
          ("bfloat16", ""),
          ("float32", "not read, as by transformers: 2 tensors of blocks that predict further tokens"))),
    *(trained_through(first, second, slow=slow or first not in FIRST)
      for first, others in AGAIN.items() for second, slow in zip(others, (False, True), strict=True)),
)  # fmt: skip


def hf_folder(tensors=None, **fields):
    """Return what writes an untied Llama into ``hf``, with some tensors and fields of its config changed."""

    def write(folder):
        write_hf_folder(folder / "hf", LLAMA)
        edit(folder / "hf", tensors or {})
        raw = json.loads((folder / "hf" / "config.json").read_text())
        (folder / "hf" / "config.json").write_text(json.dumps(raw | fields))

    return write


def converted(source="hf", out="out", **options):
    return lambda folder: convert(folder / source, folder / out, **options)


CUT = converted(tensor=2)
NORM = "model.norm.weight"


def norm(value):
    return {NORM: torch.full((32,), value)}


def without_a_block(folder):
    hf_folder()(folder)
    edit(folder / "hf", {name: None for name in weights(folder / "hf") if name.startswith("model.layers.1.")})


def without_prefix(folder):
    hf_folder()(folder)
    old = weights(folder / "hf")
    edit(folder / "hf", {name: None for name in old} | {name[6:]: one for name, one in old.items()})


def further_block(folder):
    """Write one more block than the one that the config counts as predicting a further token."""
    write_hf_folder(folder / "hf", config("glm4_moe", layers=3, num_nextn_predict_layers=1))
    edit(folder / "hf", {"model.layers.4.eh_proj.weight": torch.ones(32, 64)})


def with_other_outputs(folder):
    hf_folder()(folder)
    (folder / "full").mkdir()
    (folder / "full" / "x").write_text("")
    (folder / "file").write_text("")


def damaged_checkpoint(damage):
    def write(folder):
        hf_folder()(folder)
        CUT(folder)
        damage(folder / "out" / "pipeline-00-of-01.tensor-01-of-02.safetensors")

    return write


def end_with_nan(file):
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\xc0\x7f")


def to_dcp(folder):
    convert_to_dcp(folder / "out", folder / "dcp")


def load_another_model(folder):
    raw = config("tiny_llama", hidden_size=64)
    family = family_of(raw)
    load(folder / "out", family.build(family.from_hf(raw), device="cpu"))


def load_another_family(folder):
    family = family_of(config("tiny_gpt2"))
    load(folder / "out", family.build(family.from_hf(config("tiny_gpt2")), device="cpu"))


def to_dcp_by(rules):
    """Convert to DCP by a table of names with these rules."""

    def call(folder):
        (folder / "new").mkdir()
        (folder / "new" / "names.toml").write_text(rules)
        try:
            convert_to_dcp(folder / "hf", folder / "dcp", names=str(folder / "new" / "names.toml"))
        finally:
            (folder / "new" / "names.toml").unlink()

    return call


TWO_NAMES = '[[rule]]\nhf = "model.norm.weight"\nforeign = ["a", "b"]\n'
NEW = r"expected a new (or empty )?directory"
test_conversions_of_what_does_not_fit_are_refused = refusals(
    Refused("C1-missing", CUT, r"model\.norm\.weight", given=hf_folder({NORM: None})),
    Refused("C2-extra", CUT, r"model\.extra", given=hf_folder({"model.extra.weight": torch.ones(3)})),
    Refused("C3-shape", CUT, rf"{NORM}: expected \[32\], found \[31\]",
            given=hf_folder({NORM: torch.ones(31)})),
    Refused("C5-int8", CUT, "found I8", given=hf_folder({NORM: torch.ones(32, dtype=torch.int8)})),
    Refused("C6-fp8", CUT, "Quantised", given=hf_folder({NORM: torch.ones(32).to(torch.float8_e4m3fn)})),
    Refused("C8-cast", converted(dtype="float16"), "32 that overflow", given=hf_folder(norm(1e6))),
    Refused("C8-cast-to-zero", converted(dtype="float16"), given=hf_folder(norm(1e-9)),
            says="32, so that the whole tensor becomes zero.*wider range"),
    Refused("C9-nan", CUT, "norm.weight: expected finite", given=hf_folder(norm(float("nan")))),
    Refused("C10-inf", CUT, "norm.weight: expected finite", given=hf_folder(norm(float("inf")))),
    Refused("C12-tied-but-differs", CUT, "sha256", given=hf_folder(tie_word_embeddings=True)),
    Refused("C14-untied-but-absent", CUT, r"lm_head\.weight.*Set tie_word_embeddings",
            given=hf_folder({"lm_head.weight": None})),
    Refused("C14-a-head-of-another-name", CUT, r"lm_head\.weight.*not used: output\.w.*of another model",
            given=hf_folder({"lm_head.weight": None, "output.w": torch.ones(3)})),
    Refused("C15-biases-not-told", CUT, "bias", given=hf_folder(attention_bias=False)),
    Refused("C16-hole-in-the-layers", CUT, r"model\.layers\.1\.", given=without_a_block),
    Refused("C17-names-without-prefix", CUT, "prefix", given=without_prefix),
    Refused("C18-zero-size", CUT, NORM, given=hf_folder({NORM: torch.ones(0)})),
    Refused("D6-kv-heads-not-told", CUT, "k_proj", given=hf_folder(num_key_value_heads=None)),
    Refused("D17-more-layers-than-there-are", CUT, r"layers\.3", given=hf_folder(num_hidden_layers=4)),
    Refused("D18-fewer-layers-than-there-are", CUT, r"layers\.2", given=hf_folder(num_hidden_layers=2)),
    Refused("D18-block-not-counted", CUT, r"layers\.4\.eh_proj.*no such", given=further_block),
    Refused("D19-vocabulary", CUT, r"expected \[132, 32\], found \[131, 32\]",
            given=hf_folder(vocab_size=132)),
    Refused("E1-heads", converted(tensor=3), "found 3", given=hf_folder()),
    Refused("E5-pipeline", converted(pipeline=4), "at most 3", given=hf_folder()),
    Refused("E6-split", converted(pipeline=2, split=[1, 1]), "add up to 3", given=hf_folder()),
    Refused("output-full", converted(out="full"), NEW, given=with_other_outputs),
    Refused("output-file", converted(out="file"), NEW, given=with_other_outputs),
    Refused("output-source", converted(out="hf"), "hf", given=with_other_outputs),
    Refused("output-in-source", converted(out="hf/inside"), "hf", given=with_other_outputs),
    *(Refused(f"G8-{why}-{to}", call, "CRC-32", code=4, given=damaged_checkpoint(damage))
      for why, damage in (("flipped-bit", lambda file: flip_bit(file, -100)), ("nan", end_with_nan))
      for to, call in (("hf", converted("out", "back", to="hf")), ("dcp", to_dcp))),
    Refused("no name for a tensor", to_dcp_by(""), r"names\.toml: expected a name for model\.embed_",
            given=hf_folder()),
    Refused("two names for a tensor", to_dcp_by(TWO_NAMES), "expected one foreign name, found 2",
            given=hf_folder()),
    Refused("G13-another-family", load_another_family, "model_type: expected gpt2, found llama", code=4,
            given=lambda folder: [hf_folder()(folder), CUT(folder)]),
    Refused("G13-another-model", load_another_model, "hidden_size: expected 64, found 32", code=4,
            given=lambda folder: [hf_folder()(folder), CUT(folder)]),
)  # fmt: skip


@pytest.fixture
def hf(tmp_path):
    hf_folder()(tmp_path)
    return tmp_path / "hf"


@pytest.mark.parametrize("name", MODELS)
def test_each_file_is_exactly_the_state_of_its_rank(tmp_path, name):
    write_hf_folder(tmp_path / "hf", MODELS[name])
    convert(tmp_path / "hf", tmp_path / "out", tensor=4, pipeline=2)
    source = read_source(tmp_path / "hf")
    layout = Layout(tensor=4, pipeline=2)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 8
    assert files[5] == "pipeline-01-of-02.tensor-01-of-04.safetensors"
    for rank, file in enumerate(files):
        state = ParallelState.stand_in(layout, rank)
        model = source.family.build(source.model_config, state=state)
        stored = load_file(tmp_path / "out" / file)
        shapes = {key: value.shape for key, value in model.state_dict().items()}
        assert stored.keys() == shapes.keys()
        for key, tensor in stored.items():
            # Padding of the vocabulary is in memory only.
            assert tensor.shape[1:] == shapes[key][1:]
            assert tensor.shape[0] == shapes[key][0] or key in ("embed.weight", "head.weight")
    if name == "llama":  # 2 heads on 4 ranks lie whole on each
        tensors = Manifest.load(tmp_path / "out").tensors
        roles = [part.role for part in tensors["layers.0.attention.qkv.k.weight"].parts]
        assert roles == ["owner", "replica", "replica", "replica"]
        assert all(part.role == "owner" for part in tensors["layers.0.mlp.down.weight"].parts)


@pytest.mark.parametrize("to", ["sharded", "hf"])
def test_a_place_that_is_taken_is_said_so_and_loses_the_lock_that_a_killed_run_left(tmp_path, hf, to):
    convert(hf, tmp_path / "out", to=to)
    before = contents(tmp_path / "out")
    (tmp_path / "out.tmp-lock").touch()
    found = (
        r"a complete one, and the lock of the command that was killed .* The lock is removed: use the folder",
        "one with files in it. Choose another name",
    )
    for words in found:
        with pytest.raises(BadInput, match=f"out: expected a new or empty directory, found {words}"):
            convert(hf, tmp_path / "out", to=to)
    assert contents(tmp_path / "out") == before and not (tmp_path / "out.tmp-lock").exists()


@pytest.mark.parametrize(("stated_end", "end"), [(3, 3), ([4, 3], None)])
def test_an_export_has_the_tokenizers_end_and_encodes_its_template(tmp_path, stated_end, end):
    """Where ``generation_config.json`` says how a text ends, it stays so."""
    hf_folder(eos_token_id=None)(tmp_path)
    hf, out = tmp_path / "hf", tmp_path / "out"
    tokens = [{"id": number, "content": content} for number, content in ((1, "<s>"), (3, "</s>"), (999, "x"))]
    stated = {"eos_token": {"content": "</s>"}, "bos_token": "x", "split_special_tokens": True}
    files = {"tokenizer.json": {"added_tokens": tokens}, "tokenizer_config.json": stated}
    generation = {"top_k": 5} | ({} if end else {"eos_token_id": stated_end})
    for name, content in (files | {"generation_config.json": generation}).items():
        (hf / name).write_text(json.dumps(content))
    (hf / "chat_template.jinja").touch()
    CUT(tmp_path)
    convert(out, tmp_path / "back", to="hf")

    def read(name):
        return json.loads((tmp_path / "back" / name).read_text())

    config = read("config.json")
    assert (config["eos_token_id"], config.get("bos_token_id")) == (end, None)  # x has no row
    assert read("generation_config.json") == {"top_k": 5, "eos_token_id": stated_end}
    assert read("tokenizer_config.json") == stated | {"split_special_tokens": False}
    (out / "tokenizer_config.json").unlink()
    (hf / "tokenizer_config.json").write_text("[")
    shutil.rmtree(tmp_path / "back")
    convert(hf, tmp_path / "back", to="hf")
    assert (tmp_path / "back" / "tokenizer_config.json").read_text() == "["  # what cannot be read stays


@pytest.mark.parametrize("to", ["hf", "sharded"])
def test_a_cast_that_makes_some_numbers_zero_says_how_many(tmp_path, hf, to, capsys):
    edit(hf, {NORM: torch.tensor([1.0] * 5 + [1e-9] * 27)})
    assert run(["convert", str(hf), str(tmp_path / "out"), "--to", to, "--dtype", "float16"]) == 0
    edit(hf, {"model.layers.0.input_layernorm.weight": torch.zeros(32)})
    assert run(["convert", str(hf), str(tmp_path / "zeros"), "--to", to]) == 0
    told = "".join(capsys.readouterr())
    assert "norm.weight: 27 numbers too small for the type became zero" in told
    assert told.count("is all zeros") == 1


def test_nan_passes_only_when_asked_C9(tmp_path, hf):
    edit(hf, norm(float("nan")))
    convert(hf, tmp_path / "out", tensor=2, allow_nonfinite=True)
    convert(tmp_path / "out", tmp_path / "back", allow_nonfinite=True)
    assert bool(weights(tmp_path / "back")[NORM].isnan().all())


def test_only_a_comparison_shows_a_transposed_square_matrix_C4(tmp_path, hf):
    name = "model.layers.1.self_attn.o_proj.weight"
    convert(hf, tmp_path / "out", tensor=2)
    edit(hf, {name: weights(hf)[name].T.contiguous()})
    (difference,) = differences(read_source(hf), read_source(tmp_path / "out"))
    assert difference.name == "layers.1.attention.out.weight" and difference.elements > 900


def test_llama_405b_is_planned_from_its_headers_alone_and_its_manifest_read_in_a_moment(tmp_path):
    """The folder has only the headers of 810 GB in 191 files; the data are holes in sparse files."""
    raw = published_size("llama-3.1-405b").fields
    family = family_of(raw)
    _, shapes = family.links(family.from_hf(raw))
    shards = plan_shards({name: ("BF16", shape) for name, shape in shapes.items()})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    weight_map = {name: file for file, names in shards.items() for name in names}
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, names in shards.items():
        header, entries = build_header({name: ("BF16", shapes[name]) for name in names}, {})
        with (tmp_path / file).open("wb") as opened:
            opened.write(header)
            opened.truncate(len(header) + sum(entry.nbytes for entry in entries.values()))
    for options, files in (({"to": "hf"}, len(shards)), ({"tensor": 8, "pipeline": 16}, 128)):
        plan = plan_conversion(tmp_path, **options)
        assert len(plan.files) == files and 811e9 < plan.nbytes < 813e9
    stored = tuple(StoredFile(name=name, size=6 << 30, crc32=2**32 - 1) for name in plan.files)
    stated = {"kind": "weights", "model_type": "llama", "config": {}, "layout": plan.layout}
    manifest = Manifest(**stated, files=stored, tensors=plan.tensors)  # with a part for each rank: version 2
    text = manifest.to_bytes()
    assert len(text) < 2 << 20
    begin = time.process_time()
    again = Manifest.parse(text, "405B")
    again.check("405B")
    parts = [part for tensor in again.tensors.values() for part in tensor.parts if part.file == 5]
    elapsed = time.process_time() - begin
    assert again == manifest and len(parts) == 7 * 9 + 1  # replicas of norms too
    assert elapsed < 1.5, f"{elapsed:.2f} s"
