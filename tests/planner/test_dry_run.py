"""Recipes for real work fit their devices; a run that does not fit is refused, with what would."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trilith
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file
from support.families import family_and_config
from trilith.cli.app import make_app, run
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput
from trilith.planner.dry_run import dry_run, heaviest, rank_plan
from trilith.recipes import load_recipe
from trilith.recipes.recipe import with_overrides
from trilith.runs.launch import device_here
from trilith.training.run_plan import plan
from typer.main import get_command

RECIPES = Path(trilith.__path__[0]).resolve() / "recipes"

#: Recipe -> its ranks, and the parameters of the model in billions, as its makers state them.
REAL = {
    "llama-3.2-1b-1gpu": (1, 1.24),
    "llama-3.2-1b-8gpus": (8, 1.24),
    "llama-3.1-8b-8gpus": (8, 8.03),
    "llama-3.1-70b-64gpus": (64, 70.6),
    "llama-3.1-405b-16384gpus": (16384, 405.9),
    "gpt3-175b-1024gpus": (1024, 174.6),
    "lora-llama-3.1-8b-1gpu": (1, 8.03),
    "lora-llama-3.1-70b-8gpus": (8, 70.6),
}


def test_every_recipe_is_listed():
    assert {path.stem for path in RECIPES.glob("*.toml")} == REAL.keys()


@pytest.mark.parametrize("name", REAL)
def test_a_real_recipe_fits_its_devices(name):
    ranks, billions = REAL[name]
    found = dry_run(load_recipe(RECIPES / f"{name}.toml"))
    assert found.recipe.layout.world == ranks
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert (found.device, found.room) == (80_000_000_000, 73_600_000_000)
    assert 0.2 * found.room < found.rank.total < found.room
    found.check(name)


@pytest.mark.parametrize("name", REAL)
def test_the_command_in_a_recipes_comment_is_one(name):
    """Its options exist; conversations are tokenized as such, for the model that is tuned."""
    text = (RECIPES / f"{name}.toml").read_text()
    (line,) = re.findall(r"# trilith (tokenize .*)", text)
    words = line.split()
    command = get_command(make_app())
    with command.commands["tokenize"].make_context("tokenize", words[1:]) as context:
        chat, folder = context.params["chat"], str(context.params["tokenizer"])
    recipe = load_recipe(name)
    assert chat == (recipe.lora is not None)
    if recipe.lora is not None:
        assert folder == recipe.model.init_from and folder.endswith("-Instruct")


def test_keys_of_the_layout_that_do_nothing_are_said(capsys):
    words = ["train", "llama-3.2-1b-1gpu", "--dry-run"]
    assert run(words) == 0 and "note " not in capsys.readouterr().out
    idle = ["layout.sequence=true", "layout.virtual_stages=2", "layout.ring=true"]
    assert run([*words, *idle]) == 0
    notes = re.findall(r"^note +layout\.(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert notes == [
        "sequence has no effect with tensor = 1",
        "ring has no effect with context = 1",
        "virtual_stages has no effect with pipeline = 1",
    ]


def test_a_shipped_recipe_goes_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["train", "llama-3.2-1b-1gpu", "--dry-run"]) == 0
    printed, rank = capsys.readouterr().out, dry_run(load_recipe("llama-3.2-1b-1gpu")).rank
    assert "fits" in printed and f"reserved       about {rank.reserved / 1e9:.1f} GB, if 15% of" in printed
    assert "only with" not in printed
    tight = f"memory.device_gb={rank.total * 1.1 / 1e9:.2f}"
    assert run(["train", "llama-3.2-1b-1gpu", "--dry-run", tight]) == 0
    assert capsys.readouterr().out.endswith(", only with PYTORCH_ALLOC_CONF=expandable_segments:True\n")
    assert rank.reserved - rank.runtime == pytest.approx(rank.memory.total / 0.85)
    assert "program        eager" in printed
    assert run(["train", "llama-3.2-1b-1gpu", "--dry-run", "compile=false"]) == 0
    assert "program " not in capsys.readouterr().out
    assert run(["train", "llama-3.2-2b", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert all(f"{name}" in error for name in REAL) and error.count("\n") == 1
    (tmp_path / "llama-3.2-1b-1gpu").write_text("none = 1")
    with pytest.raises(BadInput, match=r"llama-3\.2-1b-1gpu: "):
        load_recipe("llama-3.2-1b-1gpu")  # a file of that name comes first


#: Plan recipes in a process that has imported nothing else. Transformers takes seconds; so do torch's
#: compiler and its pipelines, which a trace could import.
DRY_RUNS = """
import sys
from trilith.cli.app import run
for words in (
    "llama-3.2-1b-1gpu memory.device_gb=80",
    "llama-3.1-8b-8gpus",
    "llama-3.1-405b-16384gpus",
    "llama-3.2-1b-1gpu layout.schedule=zbv layout.pipeline=2 memory.checkpointing=none",
):
    assert run(["train", *words.split(), "--dry-run"]) == 0
    assert not {"transformers", "torch.distributed.pipelining", "torch._dynamo"} & sys.modules.keys()
"""


def test_dry_runs_import_nothing_that_only_a_run_needs():
    words = [sys.executable, "-P", "-c", DRY_RUNS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nfits ") == 4


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("dry") / "recipe.toml"
    path.write_text(f"""
        out = "{path.parent / "run"}"
        steps = 1
        device = "cpu"
        compute = "bfloat16"
        [model.config]
        model_type = "llama"
        vocab_size = 8192
        hidden_size = 256
        intermediate_size = 1024
        num_hidden_layers = 6
        num_attention_heads = 4
        [layout]
        pipeline = 2
        data = 8
        [data]
        tokens = "{path.parent / "tokens"}"
        sequence_length = 512
        global_batch = 64
        micro_batch = 2
    """)
    return path


def test_it_says_what_a_rank_needs_and_starts_nothing(small, capsys):
    assert run(["train", str(small), "--dry-run", "memory.device_gb=10"]) == 0
    said = capsys.readouterr().out
    assert "16 ranks" in said and "4 micro-batches of 2 a rank" in said and "bubble 20.0%" in said
    assert "not here" in said and "tokenize" in said
    assert "fits" in said and "of 9.2 GB, 92% of the device's" in said and "reserved" not in said
    assert not (small.parent / "run").exists()
    assert run(["train", str(small), "--dry-run", "layout.pipeline=1", "layout.data=1"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.split() == ["layout", "one", "rank"]


def test_it_names_every_place_that_a_run_would_not_reach(small, tmp_path, monkeypatch):
    overrides = ["evaluation.tokens=held-out", f"checkpoint.mirror={small}"]
    notes = dry_run(load_recipe(small, overrides)).notes
    assert [note.partition(": ")[0] for note in notes] == ["data", "evaluation.tokens", "checkpoint.mirror"]
    assert "held-out" in notes[1] and f"{small}: expected a directory, found a file" in notes[2]
    store = ["checkpoint.mirror=memory://store"]
    assert len(dry_run(load_recipe(small, store)).notes) == 1

    def unreachable(*_, **named):
        raise ConnectionError("no route")

    monkeypatch.setattr(MemoryFileSystem, "ls", unreachable)
    assert dry_run(load_recipe(small, store)).notes[1].endswith("ConnectionError: no route")


def test_data_that_a_run_would_refuse_is_refused_where_it_is_here(small, tmp_path):
    write_tokens(tmp_path / "tokens")
    here = [
        f"data.tokens={tmp_path / 'tokens'}",
        "data.sequence_length=16",
        "device=auto",
        "memory.device_gb=10",
    ]
    flash = [*here, "attention_backend=flash", "compute=bfloat16"]
    assert not dry_run(load_recipe(small, flash)).notes
    with pytest.raises(BadInput, match="flash, which needs rows of one document"):
        dry_run(load_recipe(small, [*flash, "data.documents=separate"]))


def test_what_does_not_fit_is_refused_and_each_change_named_makes_it_fit(small, capsys):
    recipe = load_recipe(small)
    room = f"memory.device_gb={0.9 * heaviest(recipe, plan(recipe)).total / 1e9}"
    assert run(["train", str(small), "--dry-run", room]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error:") and error.count("\n") == 1 and "GB too much" in error
    ways = re.findall(r"((?:[a-z]+\.[a-z_]+=\S+ )+)\(", error)
    assert ways and ways[0].startswith("memory.")
    for way in ways:
        assert run(["train", str(small), "--dry-run", room, *way.split()]) == 0


def test_where_no_single_change_suffices_several_do_together(small):
    recipe = load_recipe(small)
    room = int(0.3 * heaviest(recipe, plan(recipe)).total)
    (fit,) = dry_run(recipe, device=room).remedies
    assert len(fit.changes) > 1 and fit.total <= room
    changed = with_overrides(recipe, fit.overrides.split())
    assert heaviest(changed, plan(changed)).total == fit.total


def test_where_nothing_suffices_it_says_what_was_tried(small):
    with pytest.raises(
        BadInput, match=r"Take more ranks: memory.loss_chunk, .*memory.offload do not suffice"
    ):
        dry_run(load_recipe(small), device=1_000_000).check("unsharded")
    least = ["memory.loss_chunk=64", "memory.checkpointing=full", "memory.offload=true", "layout.tensor=8"]
    least += ["layout.data=1", "layout.pipeline=1", "layout.zero=0", "data.micro_batch=1"]
    config = "model.config.num_attention_heads=8"
    with pytest.raises(BadInput, match="Take more ranks: nothing in the recipe is left to change"):
        dry_run(load_recipe(small, [*least, config]), device=1_000_000).check("unsharded")


def test_what_is_frozen_costs_no_gradients_in_the_flops(small):
    """The run's MFU takes them from the same function."""
    adapters = dry_run(load_recipe(RECIPES / "lora-llama-3.1-8b-1gpu.toml"))
    assert adapters.flops.trained == 2 * adapters.rank.trained
    frozen = load_recipe(small, ["optimizer.groups=[{match='mlp', freeze=true}]"])
    spared = dry_run(load_recipe(small)).flops.full - dry_run(frozen).flops.full
    assert spared == 2 * 6 * 3 * 256 * 1024


def test_the_heaviest_rank_is_the_default_and_any_can_be_asked_for(small, capsys):
    recipe = load_recipe(small)
    planned = plan(recipe)
    totals = [rank_plan(recipe, planned, rank).total for rank in range(16)]
    assert heaviest(recipe, planned).total == max(totals)
    assert len(set(totals)) == 2  # a stage's ranks are alike
    assert dry_run(recipe, rank=15).rank.total == totals[15]
    assert run(["train", str(small), "--dry-run", "--rank", "16"]) == 2
    assert "0 to 15" in capsys.readouterr().err


def test_auto_plans_a_gpu_where_its_memory_is_stated(small, monkeypatch):
    recipe = load_recipe(small, ["device=auto"])
    stated = with_overrides(recipe, ["memory.device_gb=80"])
    planned = [dry_run(recipe), dry_run(recipe, device=10**11), dry_run(stated)]
    assert [each.recipe.device for each in planned] == ["cpu", "cuda", "cuda"]
    assert planned[0].rank.runtime == 0 < planned[1].rank.runtime
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [device_here(device) for device in ("auto", "cpu")] == ["cuda", "cpu"]


def test_weights_of_another_model_than_the_recipe_states_are_refused(small, tmp_path):
    recipe = load_recipe(small)
    folder = tmp_path / "weights"
    folder.mkdir()
    config = recipe.model.config
    assert isinstance(config, dict)
    family, stated = family_and_config(config)
    _, shapes = family.links(stated)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(family.to_hf(stated)))
    assert plan(with_overrides(recipe, [f"model.init_from={folder}"])).config == stated
    changed = [f"model.init_from={folder}", "model.config.num_hidden_layers=7"]
    with pytest.raises(BadInput, match=r"num_hidden_layers: expected 7, found 6"):
        plan(with_overrides(recipe, changed))


def test_adapters_to_go_on_with_say_what_they_are_without_the_weights(small, tmp_path):
    """Also where changes are tried to make it fit; none of them may count as said of the adapters."""
    shape = {"r": 64, "target_modules": ["q_proj"]}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_alpha": 8, **shape}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    absent = ["model.init_from=absent"]
    stated = dry_run(
        load_recipe(small, [*absent, "lora.r=64", 'lora.target_modules=["q_proj"]', "lora.lora_alpha=8"])
    )
    recipe = load_recipe(small, [*absent, f"lora.init_from={tmp_path}"])
    room = int(0.9 * stated.rank.total)
    short = dry_run(recipe, device=room)
    assert short.rank.trained == stated.rank.trained > 0 and short.rank.total == stated.rank.total
    assert short.remedies and all(fit.total <= room for fit in short.remedies)

    unknown = dry_run(load_recipe(small, [*absent, f"lora.init_from={tmp_path / 'absent'}"]))
    assert unknown.rank.trained == dry_run(load_recipe(small, [*absent, "lora.r=8"])).rank.trained
    assert any("counted as r=8 on all-linear" in note for note in unknown.notes)


def test_a_frozen_end_of_a_model_has_no_second_part_of_a_backward(small):
    adapters = ["model.init_from=absent", "lora.r=8", "layout.pipeline=2", "layout.schedule=zbv"]
    plan = dry_run(load_recipe(small, [*adapters, "layout.data=1", "layout.zero=0"]))
    assert 0 < plan.rank.trained < plan.rank.parameters / 10
