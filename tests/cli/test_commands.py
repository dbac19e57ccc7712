"""The commands on weights, models and schedules: what they print, how they exit, and what verify refuses."""

import json
import re
import shutil
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.configs import EXPERTS, MODELS, TINY_GPT2, TINY_LLAMA
from support.inputs import change_manifest
from support.short_runs import tiny_recipe, train
from transformers import LlamaConfig, LlamaForCausalLM
from trilith.checkpoints import convert
from trilith.cli import main
from trilith.cli.app import run
from trilith.cli.shared.shown_model import features_of
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.models import FAMILIES, published_size, published_sizes
from trilith.pipeline import SCHEDULE_NAMES, schedule_kind
from trilith.simulation.model_flops import flops_per_token


@pytest.fixture
def hf(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY_LLAMA)).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_diff_sees_through_layouts_and_forms(tmp_path, hf, capsys):
    assert run(["convert", str(hf), str(tmp_path / "a"), "--tensor", "2", "--pipeline", "3"]) == 0
    assert run(["diff", str(hf), str(tmp_path / "a")]) == 0
    assert "equal, bit for bit" in capsys.readouterr().out
    tensors = load_file(hf / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 0.5
    save_file(tensors, hf / "model.safetensors")
    assert run(["diff", str(tmp_path / "a"), str(hf)]) == 1
    out = capsys.readouterr().out
    assert "layers.1.mlp.gate_up.up.weight: other numbers  1 elements, max abs 0.5" in out
    assert out.count("\n") == 1


def test_diff_names_what_one_has_alone_and_other_shapes(tmp_path, capsys):
    changes = {"a": {}, "short": {"num_hidden_layers": 1}, "wide": {"intermediate_size": 32}}
    for name in changes:
        write_hf_folder(tmp_path / name, TINY_LLAMA | changes[name])
    write_hf_folder(tmp_path / "gpt2", TINY_GPT2)
    a, short, wide, gpt2 = (str(tmp_path / name) for name in ("a", "short", "wide", "gpt2"))
    for words, says in (
        ((a, short), f"model.layers.1.mlp.up_proj.weight: only in {a}"),
        ((short, a), f"model.layers.1.mlp.up_proj.weight: only in {a}"),
        ((a, wide), "model.layers.1.mlp.up_proj.weight: shape ["),
    ):
        assert run(["diff", *words]) == 1
        assert says in capsys.readouterr().out
    assert run(["diff", a, gpt2]) == 2
    assert "gpt2: model_type: expected llama, found gpt2" in capsys.readouterr().err


def test_a_key_of_a_config_that_is_unknown_is_told_in_one_line(hf, monkeypatch, capsys):
    config = hf / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"some\nkey\x1b": 3}))
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back after the test
    monkeypatch.setattr(sys, "argv", ["trilith", "inspect", str(hf)])
    with pytest.warns(UserWarning, match="unknown") as told, pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    shown = {warnings.formatwarning(one.message, one.category, one.filename, one.lineno) for one in told}
    assert shown == {f"warning: {config}: some key\\x1b=3 is unknown and ignored\n"}
    assert len({(one.filename, one.lineno) for one in told}) == 1  # Python shows it once
    assert "UserWarning: other" in warnings.formatwarning("other", UserWarning, torch.__file__, 1)


def test_inspect_shows_the_layout_and_a_tensor(tmp_path, hf, capsys):
    assert run(["convert", str(hf), str(tmp_path / "a"), "--tensor", "2", "--pipeline", "3"]) == 0
    assert run(["inspect", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "tensor 2, pipeline 3" in out
    assert "pipeline-02-of-03.tensor-01-of-02.safetensors" in out
    assert run(["inspect", str(tmp_path / "a"), "--tensor", "norm.weight"]) == 0
    assert "norm.weight  F32 [32]  min 1  max 1  mean 1  std 0" in capsys.readouterr().out
    assert run(["inspect", str(tmp_path / "a"), "--tensor", "nothing"]) == 2


def test_a_conversion_has_its_weights_fetched_while_it_imports_and_a_dry_run_has_not(
    tmp_path, hf, monkeypatch
):
    asked = []
    monkeypatch.setattr("trilith.cli.convert.read_ahead", lambda *words: asked.append(words))
    assert run(["convert", str(hf), str(tmp_path / "a"), "--dry-run"]) == 0 and not asked
    assert run(["convert", str(hf), str(tmp_path / "a"), "--workers", "3"]) == 0 and asked == [(hf, 3)]


def test_a_dry_run_writes_nothing(tmp_path, hf, capsys):
    assert run(["convert", str(hf), str(tmp_path / "a"), "--tensor", "4", "--dry-run"]) == 0
    assert "layers.2.mlp.down.weight  F32 [32, 12]  from 1 piece" in capsys.readouterr().out
    assert not (tmp_path / "a").exists()


def printed(capsys, *words):
    assert run(["models", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_family_is_listed_with_what_it_can_do(capsys):
    found = printed(capsys)
    assert found.keys() == FAMILIES.keys()
    with_experts = {MODELS[row]["model_type"] for row in EXPERTS}
    for family, one in found.items():
        assert ("expert" in one["axes"]) == (family in with_experts), family
        assert {"tensor", "pipeline"} <= {*one["axes"]} and one["lora"][0] == "linears", family
    assert {*found["mixtral"]["lora"]} == {"linears", "experts"}
    assert [name for one in found.values() for name in one["sizes"]] == sorted(
        published_sizes(), key=lambda name: [*FAMILIES].index(published_sizes()[name].family.model_type)
    )


def test_a_family_that_refuses_an_axis_has_not_the_feature(monkeypatch):
    from trilith.models import LlamaConfig
    from trilith.parallel_state import BadInput

    check = LlamaConfig.check_layout

    def no_context(self, layout):
        check(self, layout)
        if layout.context > 1:
            raise BadInput("layout", "context", expected=1, found=layout.context)

    monkeypatch.setattr(LlamaConfig, "check_layout", no_context)
    axes = [features_of(FAMILIES[name]).axes for name in ("llama", "gpt2")]
    assert "context" not in axes[0] and "context" in axes[1]


def test_a_size_is_shown_with_its_costs(capsys):
    found = printed(capsys, "mixtral-8x7b")
    assert found["parameters"] == 46_702_792_704 and found["active_parameters"] == 12_879_925_248
    assert found["weights_bytes"] == 2 * found["parameters"]
    size = published_size("mixtral-8x7b")
    flops = flops_per_token(size.family.on_meta(size.config), found["sequence_length"])
    assert found["flops_per_token"] == {"causal": flops.causal, "full": flops.full}
    assert found["config"] == size.fields
    assert run(["models", "mixtral-8x7b"]) == 0
    said = capsys.readouterr().out
    assert "46,702,792,704, of which a token meets 12,879,925,248" in said and "93.41 GB in bfloat16" in said
    assert "trilith plan mixtral-8x7b" in said and "num_local_experts = 8" in said


def test_a_family_by_name_lists_its_sizes(capsys):
    assert printed(capsys, "qwen3")["qwen3-8b"] == {"parameters": 8_190_735_360}
    assert run(["models", "qwen3"]) == 0
    assert "qwen3-8b      8,190,735,360 parameters" in capsys.readouterr().out


def test_it_prints_and_draws(tmp_path, capsys):
    picture = tmp_path / "zbv.png"
    assert run(f"schedule zbv --pipeline 2 --micro-batches 4 --out {picture}".split()) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    # The last: 1 / (3 * 2 * 4 + 1).
    for line in ("rank 0 +0 3 ", "rank 1 +1 2 ", r"all +4\.0%; by the formula 4\.0%$"):
        assert re.search(f"^{line}", printed, re.MULTILINE), line


@pytest.mark.parametrize("command", ["schedule", "parity"])
def test_the_help_names_every_schedule_and_how_many_stages_each_has(command, capsys):
    run([command, "--help"])
    printed = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert ", ".join(SCHEDULE_NAMES) in printed
    plain = [name for name in SCHEDULE_NAMES if schedule_kind(name).virtual_stages == 1]
    assert f"default: 2, or 1 with {', '.join(plain)}" in printed
    assert {schedule_kind(name).virtual_stages for name in SCHEDULE_NAMES} == {1, 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    write_hf_folder(folder / "hf", TINY_LLAMA)
    convert(folder / "hf", folder / "out", tensor=2)
    return folder / "out"


def stating(value, *keys):
    """Return the change of a manifest that states this at the keys, one below the other."""

    def change(m):
        for key in keys[:-1]:
            m = m[key]
        m[keys[-1]] = value(m[keys[-1]]) if callable(value) else value

    return change


def both(*changes):
    return lambda m: [change(m) for change in changes]


def remembers(**what):
    return lambda m: m["state"]["memory"].update(what)


LLLAMA = both(stating("lllama", "model_type"), stating("lllama", "config", "model_type"))
SPLIT = both(stating(2, "layout", "pipeline"), stating({"split": [1, 1]}, "state"))
MODEL = {
    "no such type": (LLLAMA, "lllama"),
    "one layer more": (
        stating(lambda n: n + 1, "config", "num_hidden_layers"), "expected .*found no such tensor"
    ),
    "one layer less": (stating(lambda n: n - 1, "config", "num_hidden_layers"), "expected no such tensor"),
    "wider": (stating(lambda n: n * 2, "config", "intermediate_size"), "expected"),
    "uncuttable": (stating(3, "layout", "tensor"), "tensor"),
    "too many stages": (stating(7, "layout", "pipeline"), "pipeline|layers"),
    "split elsewhere": (SPLIT, "split"),
}  # fmt: skip
AS_MANY = "expected as many updates and skipped steps as steps, 2"
PROGRESS = {
    "no step": (stating(None, "step"), "step: expected the step of a training run, found none"),
    "weights with moments": (
        stating("weights", "kind"), "expected no such tensor, .* is one of kind 'weights'"
    ),
    "a frozen weight with moments": (
        stating(["norm.weight"], "state", "frozen"), "exp_avg.norm.weight': expected no such tensor"
    ),
    "updates below 0": (remembers(updates=-1), r"state\.memory\.updates: .* found -1"),
    "updates beyond any": (remembers(updates=10**18, skipped=None), r"state\.memory\.updates: "),
    "updates that are text": (remembers(updates="2"), r"state\.memory\.updates: .* found '2'"),
    "more updates than steps": (remembers(updates=3), AS_MANY),
    "a loss scale of 0": (remembers(loss_scale={"value": 0.0, "good": 1}), r"loss_scale\.value"),
    "a loss that is text": (remembers(spikes={"losses": ["x"], "norms": []}), r"spikes\.losses\.0"),
    "updates of no tensor": (remembers(updates_of={"nobody": 1}), "nobody"),
    "a memory that is a list": (stating([1], "state", "memory"), r"state\.memory"),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train(tiny_recipe(folder / "run", write_tokens(folder / "tokens"), steps=2))
    return folder / "run" / "checkpoints" / "step-00000002"


@pytest.mark.parametrize("what", [*MODEL, *PROGRESS])
def test_verify_refuses_what_a_manifest_cannot_mean_and_progress_that_no_run_made(
    whole, trained, tmp_path, what, capsys
):
    change, says = (MODEL | PROGRESS)[what]
    folder = shutil.copytree(whole if what in MODEL else trained, tmp_path / "copy")
    assert run(["verify", str(folder)]) == 0
    change_manifest(folder, change)
    capsys.readouterr()
    assert run(["verify", str(folder)]) == 4
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(says, error), error
    assert what in PROGRESS or "manifest.json" in error


def test_verify_refuses_a_step_beyond_those_of_the_run(trained, tmp_path, capsys):
    shutil.copytree(trained.parents[1], tmp_path / "run")
    written = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert run(["verify", str(tmp_path / "run")]) == 0
    written.rename(written.with_name("step-00000003"))
    change_manifest(written.with_name("step-00000003"), both(stating(3, "step"), remembers(updates=3)))
    capsys.readouterr()
    assert run(["verify", str(tmp_path / "run")]) == 4
    assert "step: expected at most 2, the run's steps, found 3" in capsys.readouterr().err
    (tmp_path / "run" / "events.jsonl").write_text("")  # which then states no steps
    assert run(["verify", str(tmp_path / "run")]) == 0
