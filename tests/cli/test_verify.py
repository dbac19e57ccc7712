"""`trilith verify`: a manifest that is sealed and consistent, but states what cannot be, is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
from support.configs import TINY_LLAMA
from support.short_runs import tiny_recipe, train
from trilith.checkpoints import convert
from trilith.checkpoints.seal import seal
from trilith.cli.app import run
from trilith.machine.random_files import write_hf_folder, write_tokens


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    write_hf_folder(folder / "hf", TINY_LLAMA)
    convert(folder / "hf", folder / "out", tensor=2)
    return folder / "out"


def rewritten(folder, change, *, sealed=True):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("seal")
    change(manifest)
    text = (json.dumps(manifest)[:-1] + "\n}\n").encode()
    (folder / "manifest.json").write_bytes(seal(text) if sealed else text)


def no_such_type(m):
    m["model_type"] = m["config"]["model_type"] = "lllama"


def one_layer_more(m):
    m["config"]["num_hidden_layers"] += 1


def one_layer_less(m):
    m["config"]["num_hidden_layers"] -= 1


def wider(m):
    m["config"]["intermediate_size"] *= 2


def uncuttable(m):
    m["layout"]["tensor"] = 3


def too_many_stages(m):
    m["layout"]["pipeline"] = 7


def split_elsewhere(m):
    m["layout"]["pipeline"], m["state"] = 2, {"split": [1, 1]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (no_such_type, "lllama"),
        (one_layer_more, "expected .*found no such tensor"),
        (one_layer_less, "expected no such tensor"),
        (wider, "expected"),
        (uncuttable, "tensor"),
        (too_many_stages, "pipeline|layers"),
        (split_elsewhere, "split"),
    ],
)
def test_verify_refuses_what_a_manifest_cannot_mean(whole, tmp_path, change, says, capsys):
    folder = _copy(whole, tmp_path)
    rewritten(folder, change)
    assert run(["verify", str(folder)]) == 4
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "manifest.json" in error
    assert re.search(says, error), error


def no_step(m):
    m["step"] = None


def of_weights(m):
    m["kind"] = "weights"


def frozen_with_moments(m):
    m["state"]["frozen"] = ["norm.weight"]


def remembers(**what):
    return lambda m: m["state"]["memory"].update(what)


PROGRESS = {
    "no step": (no_step, "step: expected the step of a training run, found none"),
    "weights with moments": (of_weights, "expected no such tensor, .* is one of kind 'weights'"),
    "a frozen weight with moments": (frozen_with_moments, "exp_avg.norm.weight': expected no such tensor"),
    "updates below 0": (remembers(updates=-1), r"state\.memory\.updates: .* found -1"),
    "updates beyond any": (remembers(updates=10**18, skipped=None), r"state\.memory\.updates: "),
    "updates that are text": (remembers(updates="2"), r"state\.memory\.updates: .* found '2'"),
    "more updates than steps": (
        remembers(updates=3),
        "expected as many updates and skipped steps as steps, 2",
    ),
    "a loss scale of 0": (remembers(loss_scale={"value": 0.0, "good": 1}), r"loss_scale\.value"),
    "a loss that is text": (remembers(spikes={"losses": ["x"], "norms": []}), r"spikes\.losses\.0"),
    "updates of no tensor": (remembers(updates_of={"nobody": 1}), "nobody"),
    "a memory that is a list": (lambda m: m["state"].update(memory=[1]), r"state\.memory"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train(tiny_recipe(folder / "run", write_tokens(folder / "tokens"), steps=2))
    return folder / "run" / "checkpoints" / "step-00000002"


@pytest.mark.parametrize("what", PROGRESS)
def test_verify_refuses_progress_that_no_run_can_have_made(trained, tmp_path, what, capsys):
    change, says = PROGRESS[what]
    folder = _copy(trained, tmp_path)
    assert run(["verify", str(folder)]) == 0
    rewritten(folder, change)
    capsys.readouterr()
    assert run(["verify", str(folder)]) == 4
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(says, error), error


def test_verify_says_that_a_manifest_of_the_release_before_has_no_seal(whole, tmp_path, capsys):
    assert run(["verify", str(whole)]) == 0
    assert "no seal" not in capsys.readouterr().out
    folder = _copy(whole, tmp_path)
    rewritten(folder, lambda m: m.update(version=1), sealed=False)
    assert run(["verify", str(folder)]) == 0
    assert "no seal" in capsys.readouterr().out


def test_verify_refuses_a_step_beyond_those_of_the_run(tmp_path, capsys):
    train(tiny_recipe(tmp_path / "run", write_tokens(tmp_path / "tokens"), steps=2))
    written = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert run(["verify", str(tmp_path / "run")]) == 0
    written.rename(written.with_name("step-00000003"))
    rewritten(written.with_name("step-00000003"), lambda m: (m.update(step=3), remembers(updates=3)(m)))
    capsys.readouterr()
    assert run(["verify", str(tmp_path / "run")]) == 4
    assert "step: expected at most 2, the run's steps, found 3" in capsys.readouterr().err


def _copy(folder, to):
    return Path(shutil.copytree(folder, to / "copy"))
