"""Checkpoints of other projects: every tensor bitwise, moments to go on from, and after a kill too."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forms import CONFIG, WEIGHTS, made_once, save, titan_name
from megatron_by_hand import unpacked
from safetensors.torch import load_file, save_file
from support.any_model import tiny
from support.configs import MODELS, config
from support.families import transformers_model
from support.folders import bytes_read
from support.kills import Work, killed_work
from support.round_trips import RoundTrip, Source, assert_same, round_trips, weights
from transformers import AutoModelForCausalLM
from trilith.checkpoints import ConversionOptions, convert, convert_to_dcp, differences, read_source
from trilith.cli.app import run
from trilith.machine.random_files import write_hf_folder
from trilith.parallel_state import BadInput
from trilith.storage.disk import DiskFailed

FORMS = ["titan", "accelerate", "dcp", "model.pt", "bin", "bins", "llama2", "llama3"]


def source_of(form):
    """Return what gives a form, with the config of ``hf`` where it has none of its own."""

    def give(folder):
        config = [] if form.startswith("bin") else ["--config", str(made_once() / "hf")]
        return Source(made_once() / form, weights(made_once() / "hf"), config)

    return give


def stacked_experts(folder):
    """Write Qwen3-MoE with its experts in stacks, as torchtitan does."""
    raw = MODELS["qwen3_moe"]
    write_hf_folder(folder / "hf", raw)
    hf, stacks = weights(folder / "hf"), {}
    theirs = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name, weight in hf.items():
        block, inside, rest = name.partition(".mlp.experts.0.")
        if inside:
            each = [hf[f"{block}.mlp.experts.{e}.{rest}"] for e in range(raw["num_experts"])]
            kind = theirs[rest.removesuffix(".weight")]
            stacks[f"{block.removeprefix('model.')}.moe.experts.{kind}"] = torch.stack(each)
        elif ".mlp.experts." not in name:
            plain = titan_name(name).replace("mlp.gate.", "moe.router.gate.")
            stacks[plain.replace("self_attn.", "attention.")] = weight
    save(stacks, folder / "titan")
    convert_to_dcp(folder / "hf", folder / "again", names="titan")
    assert_same(loaded(folder / "again"), stacks)
    return Source(folder / "titan", hf, ["--config", str(folder / "hf")])


def with_output_layer(form):
    """Store the tied output layer as well, and buffers; it is the embedding."""

    def give(folder):
        write_hf_folder(folder / "hf", CONFIG | {"tie_word_embeddings": True})
        hf = weights(folder / "hf")
        buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(2)}
        whole = {"model": hf | buffers | {"lm_head.weight": hf["model.embed_tokens.weight"]}}
        torch.save(whole, folder / form) if form == "shared.pt" else save(whole, folder / form)
        return Source(folder / form, hf, ["--config", str(folder / "hf")])

    return give


def state_of(raw, *words):
    """Return what saves transformers' model under the names of its modules, which are not those of files."""

    def give(folder):
        model = transformers_model(raw)
        model.save_pretrained(folder / "hf")
        torch.save({"model": model.state_dict()}, folder / "all.pt")
        return Source(folder / "all.pt", weights(folder / "hf"), ["--config", str(folder / "hf"), *words])

    return give


def users_rules(folder):
    """Write a file in which matrices are joined, transposed and padded, and a table that says so."""
    hf = weights(made_once() / "hf")
    fused = {name: weight for name, weight in hf.items() if "gate_proj" not in name and "up_proj" not in name}
    for i in range(2):
        prefix = f"model.layers.{i}.mlp."
        joined = [hf[f"{prefix}{part}_proj.weight"] for part in ("gate", "up")]
        fused[f"{prefix}both.weight"] = torch.cat(joined)
        fused[f"{prefix}down_proj.weight"] = fused[f"{prefix}down_proj.weight"].T.contiguous()
    fused["model.embed_tokens.weight"] = torch.cat([hf["model.embed_tokens.weight"], torch.ones(3, 16)])
    torch.save(fused, folder / "fused.pt")
    rules = [
        {"foreign": "model.layers.{i}.mlp.both.weight",
         "hf": [f"model.layers.{{i}}.mlp.{one}_proj.weight" for one in ("gate", "up")]},
        {"foreign": "model.layers.{i}.mlp.down_proj.weight", "hf": "model.layers.{i}.mlp.down_proj.weight",
         "transpose": True},
        {"foreign": "model.embed_tokens.weight", "hf": "model.embed_tokens.weight", "padded": True},
    ]  # fmt: skip
    done = ("mlp.", "embed_tokens")
    rules += [{"foreign": name, "hf": name} for name in hf if not any(one in name for one in done)]
    lines = []
    for rule in rules:
        lines += ["[[rule]]", *(f"{key} = {json.dumps(value)}" for key, value in rule.items())]
    (folder / "mine.toml").write_text("\n".join(lines))
    words = ["--config", str(made_once() / "hf"), "--names", str(folder / "mine.toml")]
    return Source(folder / "fused.pt", hf, words)


test_every_form_becomes_the_same_folder_of_hugging_face = round_trips(
    *(RoundTrip(form, source_of(form), ["--to hf --verify"]) for form in FORMS),
    *(RoundTrip(f"{form} in a layout", source_of(form), ["--tensor 2 --pipeline 2", "--to hf"])
      for form in ("titan", "llama3")),
    RoundTrip("stacked experts", stacked_experts, ["--to hf"]),
    RoundTrip("an output layer in a pickle", with_output_layer("shared.pt"), ["--to hf"]),
    RoundTrip("an output layer in dcp", with_output_layer("dcp"), ["--to hf"]),
    RoundTrip("modules of experts", state_of(MODELS["qwen3_moe"], "--implementation", "transformers"),
              ["--to hf"]),
    RoundTrip("modules of other names", state_of(tiny("exaone")), ["--to hf"]),
    RoundTrip("a user's rules", users_rules, ["--to hf"]),
)  # fmt: skip


def test_moments_come_along_into_a_layout_and_not_into_a_folder_of_hugging_face(made, tmp_path):
    plan = convert(made / "titan", tmp_path / "out", config=made / "hf", tensor=2)
    source = read_source(tmp_path / "out")
    assert source.manifest is not None and source.manifest.kind == "training"
    assert source.manifest.step == 7 and source.manifest.state["memory"] == {"updates": 7}
    weights = [name for name in source.catalog if not name.startswith("optimizer.")]
    for name in weights:
        weight = source.ours[name].read()
        assert torch.equal(source.ours[f"optimizer.exp_avg.{name}"].read(), weight * 2)
        assert torch.equal(source.ours[f"optimizer.exp_avg_sq.{name}"].read(), weight * weight)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert any("param_groups" in line for line in plan.source.warnings)
    theirs = read_source(made / "accelerate", config=made / "hf")
    assert theirs.moments and theirs.foreign is not None and theirs.foreign.updates == 2


def test_neither_a_repeated_output_layer_nor_a_buffer_needs_moments(tmp_path):
    write_hf_folder(tmp_path / "hf", config("glm4_moe", tie_word_embeddings=True))
    hf = weights(tmp_path / "hf")
    state = {
        name: {"exp_avg": one, "exp_avg_sq": one} for name, one in hf.items() if "correction" not in name
    }
    assert len(state) < len(hf)
    model = hf | {"lm_head.weight": hf["model.embed_tokens.weight"]}
    save({"model": model, "optim": {"state": state}}, tmp_path / "dcp")
    assert convert(tmp_path / "dcp", tmp_path / "out", config=tmp_path / "hf", tensor=2).keeps_moments
    moments = read_source(tmp_path / "out").hf
    assert_same(
        {name: moments[f"optimizer.exp_avg.{name}"].read() for name in state}, {n: hf[n] for n in state}
    )


def test_moments_that_some_weights_lack_are_left_out_with_a_warning(made, tmp_path):
    hf = load_file(made / "hf" / WEIGHTS)
    state = {name: {"exp_avg": one, "exp_avg_sq": one} for name, one in hf.items()}
    del state["model.norm.weight"]["exp_avg"]
    save({"model": hf, "optim": {"state": state}}, tmp_path / "dcp")
    plan = convert(tmp_path / "dcp", tmp_path / "out", config=made / "hf", tensor=2)
    assert not plan.source.moments and not plan.keeps_moments
    says = "moments are left out: there are none of model.model.norm"
    assert any(says in warning for warning in plan.source.warnings)


def test_weights_that_were_updated_less_often_keep_their_number_of_updates(made, tmp_path):
    hf = load_file(made / "hf" / WEIGHTS)
    counts = {name: torch.tensor(3.0 - name.endswith("norm.weight")) for name in hf}
    state = {name: {"exp_avg": one, "exp_avg_sq": one, "step": counts[name]} for name, one in hf.items()}
    save({"model": hf, "optim": {"state": state}}, tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "ours", config=made / "hf", tensor=2)
    for source in ({"src": tmp_path / "ours"}, {"src": tmp_path / "dcp", "config": made / "hf"}):
        again = tmp_path / f"again-{source['src'].name}"
        convert_to_dcp(dst=again, **source)
        assert_same(
            {name: one for name, one in loaded(again).items() if name.endswith(".step")},
            {f"optim.state.{name}.step": count for name, count in counts.items()},
        )


def loaded(folder):
    """Return all tensors of a DCP checkpoint, read by torch's own reader."""
    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata.items()
    tensors = {name: one for name, one in entries if hasattr(one, "size")}
    state = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in tensors.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def test_a_checkpoint_of_ours_becomes_one_that_torch_loads_with_its_moments(made, tmp_path):
    convert(made / "titan", tmp_path / "ours", config=made / "hf", tensor=2, pipeline=2)
    words = ["--to", "dcp", "--names", "titan"]
    assert run(["convert", str(tmp_path / "ours"), str(tmp_path / "titan"), *words]) == 0
    before, after = loaded(made / "titan"), loaded(tmp_path / "titan")
    assert len(after) == 84
    assert_same(after, {name: one for name, one in before.items() if name in after})
    assert all("train_state" in name or ".lr" in name for name in before.keys() - after.keys())
    ours, theirs = read_source(tmp_path / "ours"), read_source(tmp_path / "titan", config=made / "hf")
    for a, b in ((theirs, ours), (read_source(made / "hf"), ours)):  # the latter has no moments
        assert not [*differences(a, b)]


def test_transformers_loads_what_is_written_under_its_names(made, tmp_path):
    assert run(["convert", str(made / "hf"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    model = AutoModelForCausalLM.from_pretrained(made / "hf")
    wanted = {name: one.clone() for name, one in model.state_dict().items()}
    state = {"model": {name: torch.zeros_like(one) for name, one in wanted.items()}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same(state["model"], wanted)
    assert run(["convert", str(made / "hf"), str(tmp_path / "x"), "--to", "dcp", "--tensor", "2"]) == 2
    assert not (tmp_path / "x").exists()
    with pytest.raises(BadInput, match="new or empty"):
        convert_to_dcp(made / "hf", tmp_path / "dcp")


@pytest.mark.parametrize("size", [100, 5000], ids=["at once", "in a tensor"])
def test_a_disk_that_is_full_is_named_under_torchs_writer(made, tmp_path, size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(DiskFailed, match=r"/full\.tmp-.*: cannot be written: File too large\. Raise"):
            convert_to_dcp(made / "hf", tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*tmp_path.iterdir()]


def test_the_commands_read_every_form(made, tmp_path, capsys):
    config = ["--config", str(made / "hf")]
    assert run(["inspect", str(made / "titan")]) == 0
    assert "tok_embeddings.weight" in capsys.readouterr().out
    assert run(["inspect", str(made / "llama2"), *config, "--tensor", "model.norm.weight"]) == 0
    assert run(["diff", str(made / "hf"), str(made / "llama3"), *config]) == 0
    assert run(["inspect", str(made / "llama3")]) == 0
    assert "hidden_size = 16" in capsys.readouterr().out
    checkpoint, config = map(str, unpacked("llama_legacy", tmp_path))
    assert run(["verify", checkpoint, "--config", config]) == run(["inspect", checkpoint]) == 0
    told, warned = capsys.readouterr()
    assert "warning: " not in told and "warning: " in warned
    assert "Megatron legacy" in told and "vocab_size = 1 to 32" in told


@pytest.mark.parametrize("form", ["hf", "twice", *FORMS])
def test_verify_reads_each_byte_of_any_form_once(made, form, capsys, tmp_path):
    """It looks at numbers, compares sums and what is there twice."""
    config = [] if form in ("hf", "twice", "bin", "bins") else ["--config", str(made / "hf")]
    place = made / form
    if form == "twice":
        write_hf_folder(place := tmp_path / form, CONFIG | {"tie_word_embeddings": True})
        hf = weights(place)
        save_file(hf | {"lm_head.weight": hf["model.embed_tokens.weight"].clone()}, place / WEIGHTS)
    with bytes_read(Path("/")) as headers:
        source = read_source(place, config=config[1] if config else None, compare=False)
    tensors = {tensor.name: tensor for pair in source.repeated for tensor in (pair.first, pair.again)}
    needed = sum(tensor.nbytes for tensor in (source.catalog | tensors).values())
    with bytes_read(Path("/")) as read:
        assert run(["verify", str(place), *config]) == 0
    there = str(place).removeprefix("/")
    assert sum(count for path, count in (read - headers).items() if path.startswith(there)) == needed
    if form in ("hf", "twice"):
        name = "lm_head.weight" if form == "twice" else "model.norm.weight"
        hf, damaged = weights(place), shutil.copytree(place, tmp_path / "damaged")
        hf[name].view(-1)[-1] = 7.0 if form == "twice" else float("inf")
        save_file(hf, damaged / WEIGHTS)
        assert run(["verify", str(damaged)]) == 2
        says = "the bytes of model.embed_tokens" if form == "twice" else f"{name}: expected finite numbers"
        assert says in capsys.readouterr().err


def convert_foreign(src, dst, note_every):
    options = ConversionOptions(note_every=note_every)
    convert(src, dst, config=Path(src).parent / "config", tensor=2, pipeline=2, options=options)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Checkpoints by the real writers, a folder of DCP and Megatron's two forms, each beside its config."""
    root = tmp_path_factory.mktemp("sources")
    for name in ("llama", "llama_legacy"):
        unpacked(name, root / name)
    for name, ours in (("titan", "titan"), ("config", "hf")):
        shutil.copytree(made_once() / ours, root / "titan" / name)
    return root


NOTED = [f"convert.noted;time={time}" for time in range(1, 17)]
POINTS = ["convert.before_data", *NOTED, "convert.after_data", "commit.before_rename", "commit.after_rename"]
test_a_killed_conversion_of_a_foreign_checkpoint_is_absent_or_whole_and_goes_on = killed_work(
    Work("titan", "titan/titan", convert_foreign, 1000, POINTS, quick=["convert.noted;time=9"]),
    Work("megatron", "llama/iter_0000003", convert_foreign, 1000, POINTS),
    Work("megatron legacy", "llama_legacy/iter_0000003", convert_foreign, 1000, POINTS),
)
