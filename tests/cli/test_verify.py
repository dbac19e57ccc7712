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
    folder = _copy(whole if what in MODEL else trained, tmp_path)
    assert run(["verify", str(folder)]) == 0
    rewritten(folder, change)
    capsys.readouterr()
    assert run(["verify", str(folder)]) == 4
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(says, error), error
    assert what in PROGRESS or "manifest.json" in error


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
