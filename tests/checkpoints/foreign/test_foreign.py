"""Checkpoints of other projects: every tensor bitwise, logits as transformers', moments to go on from."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forms import CONFIG, MADE, WEIGHTS, save
from safetensors.torch import load_file
from support.configs import MODELS, TINIEST_LLAMA, TINY_LLAMA
from support.folders import contents
from support.short_runs import losses, tiny_recipe, train, whole_tensors
from transformers import AutoModelForCausalLM
from trilith.checkpoints import (
    convert,
    convert_to_dcp,
    differences,
    load_model,
    read_source,
    restore_model,
    save_model,
)
from trilith.cli.app import run
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.models import family_of
from trilith.parallel_state import BadInput, Box, initialize
from trilith.training import make_adamw

FORMS = ["titan", "accelerate", "dcp", "model.pt", "bin", "bins", "llama2", "llama3"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_same_folder_of_hugging_face(form, made, tmp_path):
    config = [] if form.startswith("bin") else ["--config", str(made / "hf")]
    assert run(["convert", str(made / form), str(tmp_path / "hf"), "--to", "hf", "--verify", *config]) == 0
    assert load_file(tmp_path / "hf" / WEIGHTS).keys() == load_file(made / "hf" / WEIGHTS).keys()
    assert (tmp_path / "hf" / WEIGHTS).read_bytes() == (made / "hf" / WEIGHTS).read_bytes()
    assert (tmp_path / "hf" / "tokenizer.json").is_file() == bool(config)


@pytest.mark.parametrize("form", ["titan", "llama3"])
def test_logits_after_a_conversion_are_those_of_transformers(form, made, tmp_path):
    convert(made / form, tmp_path / "out", config=made / "hf", tensor=2, pipeline=2)
    model = load_model(tmp_path / "out")
    assert all(map(torch.equal, model.parameters(), load_model(made / "bins").parameters()))
    theirs = AutoModelForCausalLM.from_pretrained(made / "hf")
    ids = torch.randint(37, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = model(ids)[..., :37] - theirs.eval()(ids).logits
    assert float(difference.abs().max()) < 1e-5


def test_moments_come_along_into_a_layout_and_not_into_a_folder_of_hugging_face(made, tmp_path):
    plan = convert(made / "titan", tmp_path / "out", config=made / "hf", tensor=2)
    source = read_source(tmp_path / "out")
    assert source.manifest is not None and source.manifest.kind == "training"
    assert source.manifest.step == 7 and source.manifest.state["memory"] == {"updates": 7}
    links, weights = source.links(), [name for name in source.catalog if not name.startswith("optimizer.")]
    for name in weights:
        box = Box.whole(source.catalog[name].shape)
        weight = source.read(name, box, links)
        assert torch.equal(source.read(f"optimizer.exp_avg.{name}", box, links), weight * 2)
        assert torch.equal(source.read(f"optimizer.exp_avg_sq.{name}", box, links), weight * weight)
    assert any("param_groups" in line for line in plan.source.warnings)
    theirs = read_source(made / "accelerate", config=made / "hf")
    assert theirs.trains and theirs.foreign is not None and theirs.foreign.updates == 2


def test_moments_that_some_weights_lack_are_left_out_with_a_warning(made, tmp_path):
    hf = load_file(made / "hf" / WEIGHTS)
    state = {name: {"exp_avg": one, "exp_avg_sq": one} for name, one in hf.items()}
    del state["model.norm.weight"]["exp_avg"]
    save({"model": hf, "optim": {"state": state}}, tmp_path / "dcp")
    plan = convert(tmp_path / "dcp", tmp_path / "out", config=made / "hf", tensor=2)
    assert not plan.source.trains and not plan.keeps_moments
    assert any(
        "moments are left out: there are none of model.model.norm" in one for one in plan.source.warnings
    )


def moved(model, optimizer, steps):
    """Take steps with gradients that depend on the weights, so that they need no batch."""
    for step in steps:
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * (step + 1)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_run_goes_on_from_imported_moments_as_from_its_own(tmp_path):
    """Another project's AdamW is played by our own, whose state is written under Hugging Face's names."""
    family = family_of(TINIEST_LLAMA)
    config = family.from_hf(TINIEST_LLAMA)

    def fresh():
        model = family.build(config, device="cpu")
        initialize(model, 3)
        return model, make_adamw(model, lr=1e-2)

    model, optimizer = fresh()
    moved(model, optimizer, range(2))
    own = save_model(tmp_path / "own", model, optimizer, step=2)
    convert(own, tmp_path / "hf", to="hf")
    source = read_source(own)
    stored = {}
    for link in family.links(config)[0]:
        for prefix, place in (("", "model."), ("exp_avg", "optim.state."), ("exp_avg_sq", "optim.state.")):
            ours = f"optimizer.{prefix}.{link.ours}" if prefix else link.ours
            value = source.read(ours, Box.whole(source.catalog[ours].shape), source.links())
            stored[f"{place}{link.hf}{f'.{prefix}' if prefix else ''}"] = value
        stored[f"optim.state.{link.hf}.step"] = torch.tensor(2.0)
    save(stored, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "imported", config=tmp_path / "hf", to="sharded")
    ends = []
    for folder in (own, tmp_path / "imported"):
        model, optimizer = fresh()
        assert restore_model(folder, model, optimizer).step == 2
        ends.append(moved(model, optimizer, range(2, 5)))
    assert all(map(torch.equal, *ends)) and len(ends[0]) > 5
    assert not list(differences(read_source(own), read_source(tmp_path / "imported")))


@pytest.mark.slow
def test_a_run_of_trilith_goes_on_from_a_checkpoint_that_was_away(tmp_path):
    """Six steps at once; and three, then out to DCP under torchtitan's names and back, then three more."""
    config = {key: value for key, value in TINY_LLAMA.items() if key != "attention_bias"}
    recipe = tiny_recipe(tmp_path / "whole", write_tokens(tmp_path / "tokens"), model={"config": config})
    recipe["checkpoint"] = {"keep": 10, "every": 3}
    train(recipe)
    convert(tmp_path / "whole", tmp_path / "hf", to="hf")
    theirs, third = tmp_path / "titan", tmp_path / "whole" / "checkpoints" / "step-00000003"
    convert_to_dcp(third, theirs, names="titan")
    back = tmp_path / "back" / "checkpoints" / "step-00000003"
    convert(theirs, back, config=tmp_path / "hf", tensor=2)
    train(recipe | {"out": str(tmp_path / "back")})
    ours, again = (whole_tensors(tmp_path / name) for name in ("whole", "back"))
    assert ours.keys() == again.keys() and all(torch.equal(one, again[name]) for name, one in ours.items())
    assert len(losses(tmp_path / "back")) == 3


def test_stacked_experts_become_those_of_hugging_face(tmp_path):
    write_hf_folder(tmp_path / "hf", MODELS["qwen3_moe"])
    hf = load_file(tmp_path / "hf" / WEIGHTS)
    stacks = {}
    theirs = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name, weight in hf.items():
        block, inside, rest = name.partition(".mlp.experts.0.")
        if inside:
            each = [hf[f"{block}.mlp.experts.{e}.{rest}"] for e in range(MODELS["qwen3_moe"]["num_experts"])]
            kind = theirs[rest.removesuffix(".weight")]
            stacks[f"{block.removeprefix('model.')}.moe.experts.{kind}"] = torch.stack(each)
        elif ".mlp.experts." not in name:
            plain = MADE["titan_name"](name).replace("mlp.gate.", "moe.router.gate.")
            stacks[plain.replace("self_attn.", "attention.")] = weight
    save(stacks, tmp_path / "titan")
    convert(tmp_path / "titan", tmp_path / "out", config=tmp_path / "hf", to="hf")
    assert contents(tmp_path / "out")[WEIGHTS] == contents(tmp_path / "hf")[WEIGHTS]
    convert_to_dcp(tmp_path / "hf", tmp_path / "again", names="titan")
    again = loaded(tmp_path / "again")
    assert again.keys() == stacks.keys() and all(
        torch.equal(one, again[name]) for name, one in stacks.items()
    )


def loaded(folder):
    """Return all tensors of a DCP checkpoint, read by torch's own reader."""
    reader = dcp.FileSystemReader(folder)
    state = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in reader.read_metadata().state_dict_metadata.items()
        if hasattr(one, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def test_a_checkpoint_of_ours_becomes_one_that_torch_loads_with_its_moments(made, tmp_path):
    convert(made / "titan", tmp_path / "ours", config=made / "hf", tensor=2, pipeline=2)
    assert (
        run(["convert", str(tmp_path / "ours"), str(tmp_path / "titan"), "--to", "dcp", "--names", "titan"])
        == 0
    )
    before, after = loaded(made / "titan"), loaded(tmp_path / "titan")
    kept = {name: one for name, one in before.items() if "train_state" not in name and ".lr" not in name}
    assert kept.keys() == after.keys() and len(kept) == 84
    assert all(torch.equal(one, after[name]) for name, one in kept.items())
    assert not list(
        differences(read_source(tmp_path / "titan", config=made / "hf"), read_source(tmp_path / "ours"))
    )


def test_transformers_loads_what_is_written_under_its_names(made, tmp_path):
    assert run(["convert", str(made / "hf"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    model = AutoModelForCausalLM.from_pretrained(made / "hf")
    wanted = {name: one.clone() for name, one in model.state_dict().items()}
    state = {"model": {name: torch.zeros_like(one) for name, one in wanted.items()}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(one, state["model"][name]) for name, one in wanted.items()) and len(wanted) == 21
    assert run(["convert", str(made / "hf"), str(tmp_path / "x"), "--to", "dcp", "--tensor", "2"]) == 2
    assert not (tmp_path / "x").exists()
    with pytest.raises(BadInput, match="new or empty"):
        convert_to_dcp(made / "hf", tmp_path / "dcp")


def test_a_tied_output_layer_may_be_stored_as_well_if_it_is_the_embedding(tmp_path):
    write_hf_folder(tmp_path / "hf", CONFIG | {"tie_word_embeddings": True})
    hf = load_file(tmp_path / "hf" / WEIGHTS)
    embedding = hf["model.embed_tokens.weight"]
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(2)}
    whole = {"model": hf | buffers | {"lm_head.weight": embedding}}
    torch.save(whole, tmp_path / "shared.pt")
    save(whole, tmp_path / "dcp")
    for form in ("shared.pt", "dcp"):
        convert(tmp_path / form, tmp_path / f"from-{form}", config=tmp_path / "hf", to="hf")
        assert contents(tmp_path / f"from-{form}")[WEIGHTS] == contents(tmp_path / "hf")[WEIGHTS]
    save({"model": hf | {"lm_head.weight": embedding + 1}}, tmp_path / "other")
    with pytest.raises(BadInput, match="output layer: expected the embedding"):
        convert(tmp_path / "other", tmp_path / "out", config=tmp_path / "hf")


def test_a_users_table_of_rules_renames_splits_and_transposes(made, tmp_path):
    hf = load_file(made / "hf" / WEIGHTS)
    fused = {name: weight for name, weight in hf.items() if "gate_proj" not in name and "up_proj" not in name}
    for i in range(2):
        prefix = f"model.layers.{i}.mlp."
        both = [hf[f"{prefix}{one}_proj.weight"] for one in ("gate", "up")]
        fused[f"{prefix}both.weight"] = torch.cat(both)
        fused[f"{prefix}down_proj.weight"] = fused[f"{prefix}down_proj.weight"].T.contiguous()
    fused["model.embed_tokens.weight"] = torch.cat([hf["model.embed_tokens.weight"], torch.ones(3, 16)])
    torch.save(fused, tmp_path / "fused.pt")
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
    (tmp_path / "mine.toml").write_text("\n".join(lines))
    names = str(tmp_path / "mine.toml")
    convert(tmp_path / "fused.pt", tmp_path / "out", config=made / "hf", names=names, to="hf")
    assert contents(tmp_path / "out")[WEIGHTS] == contents(made / "hf")[WEIGHTS]


def test_the_commands_read_every_form(made, capsys):
    config = ["--config", str(made / "hf")]
    assert run(["inspect", str(made / "titan")]) == 0
    assert "tok_embeddings.weight" in capsys.readouterr().out
    assert run(["inspect", str(made / "llama2"), *config, "--tensor", "model.norm.weight"]) == 0
    assert run(["verify", str(made / "titan"), *config]) == 0
    assert run(["verify", str(made / "model.pt"), *config]) == 0
    assert run(["diff", str(made / "hf"), str(made / "llama3"), *config]) == 0
    assert run(["inspect", str(made / "llama3")]) == 0
    assert "hidden_size = 16" in capsys.readouterr().out
