"""Check that weights go to other layouts and formats and come back bit for bit: a row for each journey.

Every row is held to the whole promise: each conversion succeeds; the last one has the names, dtypes and bits
of the source, the files beside them, and its config or what a checkpoint says; a layout that is returned to
has its files again, byte for byte; the source stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from trilith.checkpoints import Manifest
from trilith.cli.app import run
from trilith.storage.file_names import MANIFEST

from support.folders import contents
from support.refusals import cases
from support.short_runs import whole_tensors

CONFIG = "config.json"
#: Files that go along as they are, and what a checkpoint says beside its tensors.
BESIDE = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
STATED = ("kind", "step", "seeds", "data_position", "extra", "optimizer", "state")


def weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder: of a checkpoint whole, else of its safetensors files."""
    if (folder / MANIFEST).exists():
        return whole_tensors(folder)
    return {
        name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()
    }


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Compare names, dtypes, shapes and bits."""
    assert found.keys() == wanted.keys()
    assert [
        name
        for name, tensor in wanted.items()
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor)
    ] == []


@dataclass(frozen=True)
class Source:
    """Describe what is converted, and what must come back: by default what its files hold.

    ``words``: further ones for the first conversion. ``config``: the one that must come back.
    """

    folder: Path
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    words: Sequence[str] = ()
    config: Mapping[str, Any] | None = None

    def expected_config(self) -> dict[str, Any] | None:
        """Return the config that a folder of Hugging Face must have at the end, if it is known."""
        if self.config is not None:
            return {**self.config}
        path = self.folder / CONFIG
        return json.loads(path.read_text()) if path.is_file() else None


@dataclass(frozen=True)
class RoundTrip:
    """State a source and the ways that it goes: the words of each conversion, from the output before.

    ``source`` writes it into a folder, once for all rows of a module that name the same one. ``warns``: what
    the first conversion says.
    """

    why: str
    source: Callable[[Path], Source]
    ways: Sequence[str]
    warns: str = ""
    slow: bool = False


def check_round_trip(row: RoundTrip, source: Source, folder: Path, said: Callable[[], str]) -> None:
    """Go the row's ways and compare what comes back."""
    before, at = contents(source.folder), source.folder
    passed: dict[str, dict[str, str]] = {}
    for number, way in enumerate(row.ways):
        out = folder / str(number)
        words = way.split() + [*source.words] * (number == 0)
        assert run(["convert", str(at), str(out), *words]) == 0
        assert number or row.warns in said()
        assert passed.setdefault(way, contents(out)) == contents(out), f"{way}: other files than before"
        at = out
    assert_same(weights(at), source.tensors or weights(source.folder))
    assert contents(source.folder) == before
    beside = BESIDE & before.keys()
    assert {name: contents(at).get(name) for name in beside} == {name: before[name] for name in beside}
    if (at / MANIFEST).exists():
        first, last = (Manifest.load(folder) for folder in (source.folder, at))
        assert [getattr(last, key) for key in STATED] == [getattr(first, key) for key in STATED]
    elif (config := source.expected_config()) is not None:
        assert json.loads((at / CONFIG).read_text()) == config


def round_trips(*table: RoundTrip | Iterable[RoundTrip]) -> Any:
    """Return one test with a case for each row, for a test module to bind to a name."""
    made: dict[Callable[[Path], Source], Source] = {}

    @pytest.mark.parametrize("row", cases(table))
    def test(
        row: RoundTrip,
        tmp_path: Path,
        tmp_path_factory: pytest.TempPathFactory,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        if row.source not in made:
            made[row.source] = row.source(tmp_path_factory.mktemp("source"))
        check_round_trip(row, made[row.source], tmp_path, lambda: capsys.readouterr().err)

    return test
