"""``trilith parity``: equal where it is equal, and where it is not the first module that differs is named."""

import inspect
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import config
from support.families import transformers_model
from trilith.cli.app import run
from trilith.cli.parity import parity as parity_command
from trilith.cli.shared.parity import compare_with_transformers, observe_hf
from trilith.models import CausalLM
from trilith.parallel_state import Layout
from trilith.recipes.sections import LayoutSection
from trilith.testing.parity import Question, compare, observe_ours, observe_rank


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in ("llama", "gpt2", "mixtral", "glm4_moe"):
        transformers_model(config(name, vocab_size=131)).save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def singles(folders):
    """Observe a model in transformers and on one process, once for each batch."""
    return cache(lambda question: (observe_hf(question), observe_ours(question)))


@pytest.fixture
def altered(folders, tmp_path):
    """``altered(name, place, number)``: the folder of a Llama of which one number is another."""

    def folder(name, place, number):
        tensors = load_file(folders / "llama" / "model.safetensors")
        tensors[name][place] += number
        (tmp_path / "config.json").write_bytes((folders / "llama" / "config.json").read_bytes())
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        return tmp_path

    return folder


def asked(folder, layout=None, **changes):
    changes = {"dtype": torch.float64, "samples": 4, "length": 16} | changes
    return Question(str(folder), layout or Layout(), **changes)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", Layout.of(tensor=2, pipeline=2, sequence=True)),
        ("llama", Layout.of(tensor=4)),  # two ranks share a head of keys
        ("llama", Layout.of(tensor=2, context=2, sequence=True, ring=True)),
        # Several stages a rank are in the default suite where a module that differs is named.
        pytest.param("llama", Layout(pipeline=2, virtual_stages=2, v_shape=True), marks=pytest.mark.slow),
        ("mixtral", Layout.of(data=2, expert=2, zero=1)),
        ("gpt2", Layout.of(tensor=2, data=2, zero=3)),
        # In the default suite tests/models/test_families.py has mixtures with shared experts, and norms of
        # heads; the row of Mixtral has ranks of experts.
        pytest.param(
            "glm4_moe", Layout.of(tensor=2, data=2, expert=2, zero=1, sequence=True), marks=pytest.mark.slow
        ),
    ],
)
def test_a_model_in_a_layout_is_that_of_transformers(folders, singles, name, layout):
    theirs, single = singles(asked(folders / name))
    schedule = "dualpipev" if layout.v_shape else "1f1b"
    cut = observe_ours(asked(folders / name, layout, schedule=schedule))
    for compared in (compare(theirs, single, 1e-5), compare(single, cut, 1e-10)):
        assert compared.first is None
        seen = {each.name for each in compared.differences if each.kind == "output"}
        assert {"embed", "layers.2", "layers.1.attention.qkv.k", "norm", "logits"} <= seen
        assert "layers.0.mlp.down" in seen or name == "mixtral", "experts are stacks, no modules"
        assert len([each for each in compared.differences if each.kind == "gradient"]) > 25


@pytest.mark.parametrize(
    ("sick", "named"),
    [
        ("model.layers.1.mlp.down_proj.weight", "layers.1.mlp.down"),
        ("model.layers.2.self_attn.k_proj.weight", "layers.2.attention.qkv.k"),
    ],
)
def test_the_first_module_that_differs_is_named(folders, singles, altered, sick, named):
    """One number of one weight is wrong, in one of the two models."""
    theirs, _ = singles(asked(folders / "llama"))
    first = compare(theirs, observe_ours(asked(altered(sick, (0, 0), 1.0))), 1e-4).first
    assert first is not None and first.kind == "output"
    assert first.name == named


def third_stage_backwards(question):
    """Run a rank whose stage 2 computes its two blocks in the other order."""
    whole = CausalLM.blocks_of

    def blocks_of(model, stage):
        blocks = [*whole(model, stage)]
        return iter(blocks[::-1] if stage.number == 2 else blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalLM, "blocks_of", blocks_of)
        return observe_rank(question)


def test_with_several_stages_a_rank_the_first_module_that_differs_is_named(folders, singles, monkeypatch):
    layout = Layout(pipeline=2, virtual_stages=2)
    question = asked(folders / "llama", layout, split=(1, 1, 2, 1), schedule="interleaved")
    _, single = singles(asked(folders / "llama"))
    right = compare(single, observe_ours(question), 1e-10)
    assert right.first is None and any(each.name == "layers.4" for each in right.differences)
    monkeypatch.setattr("trilith.testing.parity.observe_rank", third_stage_backwards)
    first = compare(single, observe_ours(question), 1e-10).first
    assert first is not None and (first.kind, first.name) == ("output", "layers.2.attention_norm")


def test_a_loss_or_gradient_that_is_no_number_differs(folders, singles):
    _, whole = singles(asked(folders / "llama"))
    first = compare(whole, replace(whole, losses=[float("nan")]), 1e-4).first
    assert first is not None and first.kind == "loss"
    name = "layers.0.attention.out.weight"
    box, owner, gradient = whole.gradients[name]
    sick = whole.gradients | {name: (box, owner, torch.full_like(gradient, torch.nan))}
    first = compare(whole, replace(whole, gradients=sick), 1e-4).first
    assert first is not None and first.name == name


def test_a_folder_may_be_named_from_the_directory_at_hand(folders, singles, monkeypatch):
    _, whole = singles(asked(folders / "llama"))  # starts the pool, elsewhere
    monkeypatch.chdir(folders)
    (one,) = compare_with_transformers(Question("llama", samples=2, length=8))
    assert one.first is None and whole.outputs.keys() == {
        each.name for each in one.differences if each.kind == "output"
    }


def test_the_command(folders, capsys):
    folder = str(folders / "llama")
    assert run(["parity", folder, "--tensor", "2", "--sequence-length", "16", "--modules"]) == 0
    said = capsys.readouterr().out
    against_hf, against_one = said.split("tensor 2 / one process: the same (allowed 1e-04, float32)")
    assert "one process / transformers: the same" in against_hf
    for part in (against_hf, against_one):
        assert "output   layers.1.attention.out" in part
        assert "gradient layers.0.mlp.gate_up.up.weight" in part
    several = ["--pipeline", "2", "--schedule", "zbv", "--split", "1,1,2,1"]
    assert run(["parity", folder, *several, "--sequence-length", "8"]) == 0
    said = capsys.readouterr().out
    assert "pipeline 2, virtual_stages 2, v_shape true / one process: the same" in said
    assert run(["parity", folder, "--sequence-length", "16", "--tolerance", "1e-12"]) == 1
    assert "one process / transformers: differs first in the " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tensor", "3"], "tensor: expected a divisor of num_attention_heads=4, found 3"),
        (["--device", "cuda"], "device: cuda: expected a GPU that torch sees"),
        (["--sequence-length", "65"], "--sequence-length: expected at most 64"),
        (["--data", "2", "--samples", "3"], "--samples: expected a multiple of data=2"),
        (["--tensor=2", "--sequence-parallel", "--sequence-length=15"], "expected a multiple of tensor=2"),
        (["--pipeline", "2", "--split", "2,4"], "split: expected 2 counts of at least 1 that add up to 5"),
        (["--pipeline", "2", "--split", "a"], "--split: expected whole numbers, such as 8 or 3,2, found 'a'"),
        (["--pipeline=2", "--schedule=dualpipev", "--samples=2"], "expected at least 4 with dualpipev"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(folders, arguments, says, capsys):
    assert run(["parity", str(folders / "llama"), *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_sharded_folder_is_refused_with_the_way_to_one_that_transformers_reads(folders, tmp_path, capsys):
    assert run(["convert", str(folders / "llama"), str(tmp_path / "cut"), "--tensor", "2"]) == 0
    assert run(["parity", str(tmp_path / "cut")]) == 2
    assert "found a checkpoint of trilith. `trilith convert FOLDER OUT --to hf`" in capsys.readouterr().err


def test_the_command_s_options_are_the_keys_of_a_recipe_s_layout():
    """They are written out because ``--help`` must not import torch; no axis may be missing there."""
    options = inspect.signature(parity_command).parameters
    for key, field in LayoutSection.model_fields.items():
        assert options[key].default == field.default, key
