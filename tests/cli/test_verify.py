"""`trilith verify`: a manifest that is sealed and consistent, but states what cannot be, is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trilith.checkpoints import convert
from trilith.checkpoints.seal import seal
from trilith.cli.app import run
from trilith.testing.hf_folders import write_hf_folder
from trilith.testing.short_runs import tiny_recipe, train, write_tokens
from trilith.testing.tiny_models import TINY_LLAMA


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    write_hf_folder(folder / "hf", TINY_LLAMA)
    convert(folder / "hf", folder / "out", tensor=2)
    return folder / "out"


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object], *, sealed: bool = True) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("seal")
    change(manifest)
    text = (json.dumps(manifest)[:-1] + "\n}\n").encode()
    (folder / "manifest.json").write_bytes(seal(text) if sealed else text)


def no_such_type(m: dict[str, Any]) -> None:
    m["model_type"] = m["config"]["model_type"] = "lllama"


def one_layer_more(m: dict[str, Any]) -> None:
    m["config"]["num_hidden_layers"] += 1


def one_layer_less(m: dict[str, Any]) -> None:
    m["config"]["num_hidden_layers"] -= 1


def wider(m: dict[str, Any]) -> None:
    m["config"]["intermediate_size"] *= 2


def uncuttable(m: dict[str, Any]) -> None:
    m["layout"]["tensor"] = 3


def too_many_stages(m: dict[str, Any]) -> None:
    m["layout"]["pipeline"] = 7


def split_elsewhere(m: dict[str, Any]) -> None:
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
def test_verify_refuses_what_a_manifest_cannot_mean(
    whole: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], object],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = _copy(whole, tmp_path)
    rewritten(folder, change)
    assert run(["verify", str(folder)]) == 4
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "manifest.json" in error
    assert re.search(says, error), error


def test_verify_says_that_a_manifest_of_the_release_before_has_no_seal(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(whole)]) == 0
    assert "no seal" not in capsys.readouterr().out
    folder = _copy(whole, tmp_path)
    rewritten(folder, lambda m: m.update(version=1), sealed=False)
    assert run(["verify", str(folder)]) == 0
    assert "no seal" in capsys.readouterr().out


def test_verify_refuses_a_step_beyond_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_recipe(tmp_path / "run", write_tokens(tmp_path / "tokens"), steps=2))
    written = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert run(["verify", str(tmp_path / "run")]) == 0
    written.rename(written.with_name("step-00000003"))
    rewritten(written.with_name("step-00000003"), lambda m: m.update(step=3))
    capsys.readouterr()
    assert run(["verify", str(tmp_path / "run")]) == 4
    assert "step: expected at most 2, the run's steps, found 3" in capsys.readouterr().err


def _copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))
