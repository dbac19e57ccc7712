"""A conversion of another project's checkpoint that is killed: absent or whole, and the same call goes on."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from trilith.checkpoints import ConversionOptions, convert
from trilith.testing import run_fresh
from trilith.testing.hf_folders import contents, write_hf_folder
from trilith.testing.tiny_models import WHOLE

HERE = Path(__file__).parent
CONFIG = WHOLE | {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
POINTS = [
    "convert.before_data",
    *(f"convert.noted;time={time}" for time in range(1, 17)),
    "convert.after_data",
    "commit.before_rename",
    "commit.after_rename",
]


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("titan")
    write_hf_folder(folder / "hf", CONFIG)
    with tarfile.open(HERE / "titan.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    return folder


def convert_noting(src: str, dst: str, arguments: dict[str, Any]) -> None:
    convert(src, dst, **arguments, options=ConversionOptions(note_every=1000))


@pytest.mark.parametrize(
    "point",
    [pytest.param(one, marks=[] if one.endswith("time=9") else [pytest.mark.slow]) for one in POINTS],
)
def test_a_killed_conversion_of_a_foreign_checkpoint_goes_on(titan: Path, point: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"config": titan / "hf", "tensor": 2, "pipeline": 2}
    convert(titan / "titan", tmp_path / "whole", **arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRILITH_FAULT", f"rank=0;at={point};act=kill")
        words = str(titan / "titan"), str(tmp_path / "out"), arguments
        (code,) = run_fresh(convert_noting, 1, *words, process_group=False)
    assert code == -9, code.output
    assert (tmp_path / "out").exists() == (point == "commit.after_rename")
    if point != "commit.after_rename":
        noted = [*tmp_path.glob("out.tmp-*/journal.jsonl")]
        assert len(noted) == ("noted" in point or "after_data" in point)
        convert(titan / "titan", tmp_path / "out", **arguments)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} - {"out.tmp-lock"} == {"out", "whole"}
