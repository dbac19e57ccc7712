"""Rules for any cut of another project's tensors, and checkpoints of others that cannot be used."""

import json
import pickle
import re
import shutil
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from forms import CONFIG, WEIGHTS, made_once, save
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.configs import TINY_MIXTRAL
from support.damage import truncate
from support.draws import drawn
from support.refusals import Refused, refusals
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from trilith.checkpoints import convert, foreign_format, read_source
from trilith.checkpoints.foreign.rules import Table, table_named
from trilith.checkpoints.model_tensors import model_tensors
from trilith.checkpoints.user_module_family import Described
from trilith.cli.app import run
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.models import Rule, family_of, shapes_of
from trilith.parallel_state import BadCheckpoint, BadInput, Box, Piece
from trilith.storage.catalog import Catalog, Key, LazyTensor, check_covered, listed, renamed
from trilith.storage.torch_archive import open_state_dict


def test_a_flipped_bit_of_a_weight_is_noticed_and_nothing_is_written(made, tmp_path):
    norm = load_file(made / "hf" / WEIGHTS)["model.norm.weight"].numpy().tobytes()[:16]
    for form, damage in (("titan", bytes([norm[0] ^ 1, *norm[1:]])), ("bin", b"\xff" * 16)):  # and NaNs
        shutil.copytree(made / form, tmp_path / form)
        path = next(path for path in (tmp_path / form).iterdir() if norm in path.read_bytes())
        path.write_bytes(path.read_bytes().replace(norm, damage))
        config = None if form == "bin" else made / "hf"
        with pytest.raises(BadCheckpoint, match=r"CRC-32.*altered or damaged"):
            convert(tmp_path / form, tmp_path / "out", config=config, to="hf")
        assert not (tmp_path / "out").exists()
    assert run(["verify", str(tmp_path / "titan"), "--config", str(made / "hf")]) == 4
    assert run(["verify", str(tmp_path / "bin")]) == 4


def stated(**changes):
    return json.loads((hf() / "config.json").read_text()) | changes


def of_another_model(form, says, **changes):
    return Refused(
        f"{form}-{'-'.join(changes)}-{[*changes.values()]}",
        lambda folder: convert(made_once() / form, folder / "out", config=folder, to="hf"), says,
        given=lambda folder: (folder / "config.json").write_text(json.dumps(stated(**changes))),
    )  # fmt: skip


def hf():
    return made_once() / "hf"


def converted(form, config=None, **options):
    """Return what converts a form; ``config`` returns the folder with the config."""
    return lambda folder: convert(made_once() / form, folder / "out", config=config and config(), **options)


def harmed(form, name, harm):
    return lambda folder: harm(shutil.copytree(made_once() / form, folder / form) / name)


def copied(form):
    return lambda folder: convert(folder / form, folder / "out", config=hf())


def with_metadata(change):
    """Copy a checkpoint and change its metadata, as whoever wrote it might."""

    def harm(path):
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return harmed("titan", ".metadata", harm)


def placed(**fields):
    """Change what the metadata says of the place of the first chunk."""
    return with_metadata(lambda metadata: vars(next(iter(metadata.storage_data.values()))).update(fields))


def embedding(change):
    """Change what the metadata says of one tensor."""
    return with_metadata(lambda metadata: change(metadata.state_dict_metadata["tok_embeddings.weight"]))


def listing(*numbers):
    """List the chunks of one tensor by these numbers."""

    def change(stated):
        stated.chunks[:] = [stated.chunks[number] for number in numbers]

    return embedding(change)


def holding(content):
    """Put another archive in the place of a chunk."""

    def harm(path):
        metadata = pickle.loads(path.read_bytes())
        place = next(iter(metadata.storage_data.values()))
        file = path.parent / place.relative_path
        place.offset = file.stat().st_size
        with file.open("ab") as out:
            torch.save(content, out)
        place.length = file.stat().st_size - place.offset
        path.write_bytes(pickle.dumps(metadata))

    return harmed("titan", ".metadata", harm)


def with_an_empty_chunk(metadata):
    index, place = next(iter(metadata.storage_data.items()))
    offsets = torch.Size([37, 0])
    chunk = ChunkStorageMetadata(offsets, torch.Size([0, 16]))
    metadata.state_dict_metadata["tok_embeddings.weight"].chunks.append(chunk)
    metadata.storage_data[replace(index, fqn="tok_embeddings.weight", offset=offsets)] = place


def test_a_chunk_of_nothing_is_passed_over_and_what_lies_beside_weights_is_left_out(tmp_path):
    with_metadata(with_an_empty_chunk)(tmp_path)
    assert len(read(tmp_path).tensors) == len(HF)
    shutil.rmtree(tmp_path / "titan")
    save({"model": load_file(hf() / WEIGHTS), "dataloader": {"place": torch.ones(2)}}, tmp_path / "titan")
    checkpoint = read(tmp_path)
    assert len(checkpoint.tensors) == len(HF) and "dataloader.place" in str(checkpoint.skipped)


def changed_part(change):
    """Change the tensors of a part of Meta's."""

    def harm(path):
        tensors = torch.load(path)
        change(tensors)
        torch.save(tensors, path)

    return harmed("llama2", PART, harm)


def with_params(**changes):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pickled_alone(folder):
    shutil.copytree(hf(), folder / "m")
    torch.save(load_file(folder / "m" / WEIGHTS), folder / "m" / "weights.pt")
    (folder / "m" / WEIGHTS).unlink()


def steps_that_differ(folder):
    write_hf_folder(folder / "hf", TINY_MIXTRAL)
    weights = load_file(folder / "hf" / WEIGHTS)
    state = {
        name: {"exp_avg": one, "exp_avg_sq": one, "step": torch.tensor(float("experts.0" in name))}
        for name, one in weights.items()
    }
    save({"model": weights, "optim": {"state": state}}, folder / "dcp")


def at_step(step):
    def give(folder):
        state = {"step": torch.tensor(step, dtype=torch.float64)}
        save({"model": load_file(hf() / WEIGHTS), "train_state": state}, folder / "titan")

    return give


def quantised(method):
    def give(folder):
        (folder / "config.json").write_text(json.dumps(stated(quantization_config={"quant_method": method})))
        save_file({"a": torch.ones(1)}, folder / WEIGHTS)

    return give


def with_another_output_layer(folder):
    write_hf_folder(folder / "hf", CONFIG | {"tie_word_embeddings": True})
    weights = load_file(folder / "hf" / WEIGHTS)
    save({"model": weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}}, folder / "dcp")


def read(folder):
    return foreign_format(folder / "titan").read(folder / "titan")


def converted_alone(name):
    return lambda folder: convert(folder / name, folder / "out")


def empty(*names):
    def give(folder):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()

    return give


def with_average(folder):
    weights = load_file(hf() / WEIGHTS)
    average = {name: tensor + 1 for name, tensor in weights.items()}
    torch.save({"model": weights, "average": average}, folder / "all.pt")


@pytest.mark.parametrize("beside", ["optimizer.0", "it's", "model.q.weight", "average"])
def test_a_table_of_what_the_refusal_says_leaves_out_what_is_no_weight(tmp_path, beside):
    if beside == "average":
        with_average(tmp_path)
    else:
        weights = {f"model.{name}": tensor for name, tensor in load_file(hf() / WEIGHTS).items()}
        torch.save(weights | {beside: torch.ones(2)}, tmp_path / "all.pt")
    into = partial(convert, tmp_path / "all.pt", tmp_path / "out", to="hf", config=hf())
    with pytest.raises(BadInput) as refusal:
        into()
    (tmp_path / "names.toml").write_text(re.search(r"ignored = \[.*\]", str(refusal.value))[0])
    into(names=str(tmp_path / "names.toml"))
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (hf() / WEIGHTS).read_bytes()


NO_WEIGHTS = ((), ("runs/config.json",))
CHUNK, FIRST_PART, PART = "__1_0.distcp", "consolidated.00.pth", "consolidated.01.pth"
WO = "layers.0.attention.wo.weight"
test_checkpoints_of_others_that_cannot_be_used_are_refused = refusals(
    of_another_model("titan", r"model\.layers\.2\..*9 of 30 missing", num_hidden_layers=3),
    of_another_model("titan", r"layers\.1\..*expected no such tensor", num_hidden_layers=1),
    of_another_model("titan", r"tok_embeddings.*\[37, 32\].*\[37, 16\]", hidden_size=32),
    of_another_model("llama3", r"layers: expected 2, as n_layers in .*params\.json.*3", num_hidden_layers=3),
    of_another_model("llama3", r"rms_norm_eps: expected .*as norm_eps in .*params\.json", rms_norm_eps=1e-5),
    of_another_model("llama3", r"rope_scaling: expected true, as use_scaled_rope", rope_scaling=None),
    of_another_model("model.pt", r"embed_tokens.*\[40, 16\].*\[37, 16\]", vocab_size=40),
    Refused("no config", converted("titan"), "--config with a Hugging Face folder"),
    Refused("two configs", converted("bin", config=hf), "Leave out --config"),
    Refused("unknown names", converted("titan", config=hf, names="nothing"), r"names.*titan"),
    Refused("no pattern", lambda folder: table_named(str(folder / "n.toml")),
            r"n\.toml: ignored: expected a regular expression, found '\(': missing",
            given=lambda folder: (folder / "n.toml").write_text("ignored = ['(']")),
    Refused("no chunk", copied("titan"), r"__1_0\.distcp", given=harmed("titan", CHUNK, Path.unlink)),
    Refused("a chunk cut short", copied("titan"), r"__1_0\.distcp: .*found a file of .*cut short",
            given=harmed("titan", CHUNK, lambda path: truncate(path, -1))),
    Refused("no part", copied("llama2"), r"wo\.weight.*16 columns.*8 in 1 parts.*after consolidated\.00",
            given=harmed("llama2", PART, Path.unlink)),
    Refused("no first part", copied("llama2"), r"consolidated\.00\.pth: expected a part for every rank",
            given=harmed("llama2", FIRST_PART, Path.unlink)),
    Refused("a copied part", copied("llama2"), r"01\.pth: expected its rank's part .*a copy of .*00\.pth",
            given=harmed("llama2", PART, lambda path: shutil.copy(path.with_name(FIRST_PART), path))),
    *(Refused(f"{key} of Mistral's", copied("llama2"), rf"{key}.*: expected 8, as {key} in .*params\.json",
              given=harmed("llama2", "params.json", with_params(**{key: 8})))
      for key in ("head_dim", "sliding_window")),
    Refused("a zip of something else", copied("all.pt"), "none that torch.save wrote",
            given=lambda folder: ZipFile(folder / "all.pt", "w").writestr("a/notes.txt", "x")),
    Refused("a chunk listed never", read, "owned by nobody", given=listing(0)),
    Refused("a chunk listed twice", read, "owned 2 times", given=listing(0, 1, 1)),
    Refused("compressed chunks", read, "without storage transforms",
            given=placed(transform_descriptors=["zstd"])),
    Refused("a chunk in no place", read, "a place for the chunk at",
            given=with_metadata(lambda metadata: metadata.storage_data.popitem())),
    Refused("moments without a weight", copied("titan"), r"norm.*missing",
            given=with_metadata(lambda metadata: metadata.state_dict_metadata.pop("norm.weight"))),
    Refused("another record", read, "expected TensorStorageMetadata, found tuple. The file is damaged",
            given=with_metadata(lambda m: m.state_dict_metadata.update({"tok_embeddings.weight": ()}))),
    Refused("experts' steps", lambda folder: convert(folder / "dcp", folder / "out", config=folder / "hf"),
            "experts.*: expected one number of updates of what makes it, found 0, 1",
            given=steps_that_differ),
    *(Refused(f"step {step}", read, f"step'?: expected .*, found {re.escape(text)}", given=at_step(step))
      for step, text in ((-1, "-1"), (1.5, "1.5"), (torch.nan, "nan"), (1e30, "1e+30"), ([1, 2], "F64 [2]"))),
    Refused("a place that is no number", read, "expected a name, an offset and a length, found something",
            given=placed(offset="0")),
    Refused("no chunks", read, "tok_embeddings.weight'?: expected a dtype and chunks",
            given=embedding(lambda stated: setattr(stated, "chunks", None))),
    Refused("a chunk of fewer dims", read, "tok_embeddings.weight'?: expected 2 offsets, found 1",
            given=embedding(lambda stated: setattr(stated.chunks[0], "offsets", torch.Size([0])))),
    Refused("no tensor in a chunk", read, r"distcp: .*: expected a tensor, found (OrderedDict|dict)",
            given=holding({"a": 1})),
    Refused("another tensor in a chunk", read, r"distcp: .*: expected F32 \[.*\], found I64 \[3\]",
            given=holding(torch.arange(3))),
    Refused("a part with another tensor", copied("llama2"), "extra'?: expected the tensors of .*00.pth",
            given=changed_part(lambda tensors: tensors.update(extra=torch.ones(1)))),
    Refused("a part of doubles", copied("llama2"), "wo.weight'?: expected parts that differ",
            given=changed_part(lambda tensors: tensors.update({WO: tensors[WO].double()}))),
    Refused("no table", lambda folder: table_named(str(folder / "n.toml")), r"n\.toml: rule: expected ",
            given=lambda folder: (folder / "n.toml").write_text("rule = 5")),
    Refused("names of nothing", copied("all.pt"), "names .*found a, .*Say --names",
            given=lambda folder: torch.save({"a": torch.ones(1)}, folder / "all.pt")),
    Refused("pickled weights of another name", converted_alone("m"),
            r"pickled weights. `trilith convert m/weights\.pt OUT --config m` reads", given=pickled_alone),
    *(Refused(f"GGUF {why}", call, "found GGUF. Take the safetensors",
              given=lambda folder: (folder / "x.gguf").write_bytes(b"GGUF"))
      for why, call in (("with a config", copied("x.gguf")), ("without", converted_alone("x.gguf")))),
    Refused("an output layer that is not the embedding",
            lambda folder: convert(folder / "dcp", folder / "out", config=folder / "hf"),
            r"lm_head\.weight: expected the bytes of model\.embed_tokens.*as tie_word",
            given=with_another_output_layer),
    Refused("a token file", converted_alone("chat.bin"), "chat.bin: expected weights, found a token file",
            given=lambda folder: write_tokens(folder / "chat")),
    # What a copy lost, and what is not read: the line says what to name or to do.
    Refused("no .metadata", copied("titan"), r"\.metadata: expected the index.*`cp FOLDER/\*`",
            given=harmed("titan", ".metadata", Path.unlink)),
    Refused("no .metadata of moments", copied("accelerate"), r"optimizer_0/\.metadata: expected the index",
            given=harmed("accelerate", "optimizer_0/.metadata", Path.unlink)),
    # So too where a trainer has put the model's config beside it.
    *(Refused(f"ZeRO of DeepSpeed{beside}", converted_alone("runs"),
              "found a checkpoint of DeepSpeed's.*zero_to_fp32",
              given=empty("runs/global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt", *beside))
      for beside in NO_WEIGHTS),
    # Its model states have the names of a checkpoint's, and no zero_to_fp32.py.
    *(Refused(f"{named} of DeepSpeed's universal", converted_alone(named),
              "found a universal checkpoint of DeepSpeed's.*beside the checkpoint that it was made of",
              given=empty("u/mp_rank_00_model_states.pt", "u/zero/model.norm.weight/fp32.pt"))
      for named in ("u", "u/zero")),
    *(Refused(f"a folder around one{beside}", converted_alone("runs"),
              "found a folder around one. Name runs/iter-10",
              given=empty("runs/iter-9/.metadata", "runs/iter-10/.metadata", *beside))
      for beside in NO_WEIGHTS),
    Refused("a folder around adapters", converted_alone("runs"), "Name runs/second",
            given=empty("runs/second/adapter_config.json")),
    Refused("an archive of NeMo's", converted_alone("x.nemo"), "Unpack it .*model_weights",
            given=empty("x.nemo")),
    Refused("a folder of nothing known", copied("titan"), "found no known format. These are read: Megatron",
            given=empty("titan/notes.txt")),
    Refused("one file of safetensors", converted("hf/model.safetensors", hf), "Name its folder, .*hf, which"),
    Refused("one tensor", copied("one.pt"), r"found a single tensor. Save the model's state_dict\(\)",
            given=lambda folder: torch.save(torch.ones(2), folder / "one.pt")),
    Refused("two models", copied("all.pt"), r"names: expected one model, found 2: model\.model.* and average",
            given=with_average),
    *(Refused(method, lambda folder: convert(folder, folder / "out"),
              f"quantization_config.*{method}.*Take the model", given=quantised(method))
      for method in ("awq", "fbgemm_fp8")),
)  # fmt: skip


def test_a_checkpoint_that_states_nothing_about_its_model_gets_a_warning(made, tmp_path):
    """The shapes fit twice as many heads of half the size, and the rows would be put in a wrong order."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2}
    (tmp_path / "config.json").write_text(json.dumps(stated(**heads)))
    for form in ("titan", "model.pt"):
        warnings = read_source(made / form, config=tmp_path).warnings
        assert [line for line in warnings if "states nothing about the model" in line], form
    warnings = read_source(made / "llama3", config=made / "hf").warnings
    assert not [line for line in warnings if "states nothing" in line]


FAMILY = family_of(CONFIG)
MODEL = FAMILY.from_hf(CONFIG)
HF = FAMILY.links(MODEL)[1]
Q, K, V, UP = (
    f"model.layers.{{i}}.{one}_proj.weight" for one in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.up")
)
#: Each kind of rule, and what makes the foreign tensor of block 1 of Hugging Face's.
KINDS = {
    "interleaved": (
        Rule(Q, "{i}.q", interleaved="num_attention_heads"),
        lambda w: w[Q].view(4, 2, 2, 16).transpose(1, 2).reshape(16, 16),
    ),
    "interleaved transposed": (
        Rule(Q, "{i}.q", interleaved="num_attention_heads", transpose=True),
        lambda w: w[Q].view(4, 2, 2, 16).transpose(1, 2).reshape(16, 16).T,
    ),
    "by groups": (
        Rule((Q, K, V), "{i}.qkv", groups="num_key_value_heads"),
        lambda w: torch.cat([w[Q].view(2, 8, 16), w[K].view(2, 4, 16), w[V].view(2, 4, 16)], 1).flatten(0, 1),
    ),
    "one after the other": (Rule((Q, K, V), "{i}.qkv"), lambda w: torch.cat([w[Q], w[K], w[V]])),
    "along columns": (Rule((K, V), "{i}.kv", dim=1), lambda w: torch.cat([w[K], w[V]], 1)),
    "stacked blocks": (Rule(UP, "up"), lambda w: torch.stack([torch.zeros(24, 16), w[UP]])),
    "padded": (Rule(UP, "{i}.up", padded=True), lambda w: torch.cat([w[UP], torch.ones(5, 16)])),
}


def cut(tensor, ends):
    """Return boxes that tile a tensor, cut at these indices of each dim."""
    boxes = [Box.whole(tuple(tensor.shape))]
    for dim, at in enumerate(ends):
        stops = sorted({0, *at, tensor.shape[dim]})
        boxes = [box.narrow(dim, a, b) for box in boxes for a, b in pairwise(stops)]
    return boxes


@settings(max_examples=drawn(60), deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_any_cut_into_chunks_gives_the_tensors_of_hugging_face(tmp_path_factory, kind, data):
    rule, make = KINDS[kind]
    weights = {
        name: torch.arange(float(torch.Size(HF[name.format(i=1)]).numel())).view(HF[name.format(i=1)])
        + number
        for number, name in enumerate((Q, K, V, UP))
    }
    theirs = make(weights)
    boxes = cut(theirs, [data.draw(st.lists(st.integers(1, n), max_size=3)) for n in theirs.shape])
    path = tmp_path_factory.mktemp("chunks") / "chunks.pt"
    torch.save({str(n): theirs[box.slices].clone() for n, box in enumerate(boxes)}, path)
    file = open_state_dict(path)
    name = rule.stored.format(i=1)
    parts = listed(Piece.plain(box, Key(file, str(n))) for n, box in enumerate(boxes))
    stored = LazyTensor(name, "F32", tuple(theirs.shape), parts)
    wanted = {name.format(i=1): weights[name] for name in rule.our_names}
    made = tried(stored, rule, wanted)
    for hf, weight in wanted.items():
        assert torch.equal(made[hf].read(), weight)
        part = data.draw(st.sampled_from(cut(weight, [[n // 2] for n in weight.shape])))
        assert torch.equal(made[hf].read(part), weight[part.slices])
    written = shapes_of(Table(rule=[rule]).links("llama", HF, MODEL))
    assert written[name] == tuple(theirs.shape) or rule.padded


def tried(stored, rule, wanted):
    """Return only the wanted tensors: those of block 1 of a family that has no other ones."""
    hf = {name: tuple(weight.shape) for name, weight in wanted.items()}
    names = defaultdict(list)
    for link in Table(rule=[rule]).links("llama", hf, MODEL, {stored.name: stored.shape}, "here"):
        names[link.ours].append(link.piece)
    made = renamed({stored.name: stored}, names)
    check_covered("here", made)
    return made


def test_rules_for_other_families_and_uneven_shapes_are_not_used(tmp_path):
    rule = Rule(UP, "{i}.up", only=("gpt2",))
    assert Table(rule=[rule]).links("llama", HF, MODEL, {"1.up": (24, 16)}, "here") == []
    with pytest.raises(BadInput, match=r"^here: 1\.up: expected .*\[24, 16\], found \[29, 16\].*wrong table"):
        Table(rule=[Rule(UP, "{i}.up")]).links("llama", HF, MODEL, {"1.up": (29, 16)}, "here")
    with pytest.raises(BadInput, match=r"21 of 21 missing"):
        model_tensors(tmp_path, Catalog(), Described(FAMILY, MODEL), Table(rule=[rule]))


def test_a_tensor_of_which_a_part_is_missing_is_refused_when_the_model_is_taken_from_the_files(tmp_path):
    first, *_ = HF
    boxes = {name: Box.whole(shape) for name, shape in HF.items()}
    boxes[first] = boxes[first].narrow(0, 1, HF[first][0])
    stored = Catalog({
        name: LazyTensor(name, "F32", HF[name], listed([Piece.plain(box, Key(None, name))]))
        for name, box in boxes.items()
    })  # fmt: skip
    with pytest.raises(BadInput, match=f"{first}: expected each element once, found .* by nobody"):
        model_tensors(tmp_path, stored, Described(FAMILY, MODEL))
