"""A conversion of another project's checkpoint that is killed: absent or whole, and the same call goes on."""

import tarfile
from pathlib import Path

import pytest
from megatron_models import MODELS
from support.configs import WHOLE
from support.folders import contents
from trilith.checkpoints import ConversionOptions, convert
from trilith.machine.random_files import write_hf_folder
from trilith.testing import run_fresh

HERE = Path(__file__).parent
CONFIG = WHOLE | {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
#: What the archives of the real writers hold: a folder of DCP and Megatron's two forms.
SOURCES = {
    "titan": ("titan.tar.xz", "titan"),
    "megatron": ("megatron/llama.tar.xz", "iter_0000003"),
    "megatron legacy": ("megatron/llama_legacy.tar.xz", "iter_0000003"),
}
POINTS = [
    "convert.before_data",
    *(f"convert.noted;time={time}" for time in range(1, 17)),
    "convert.after_data",
    "commit.before_rename",
    "commit.after_rename",
]
KILLS = [
    pytest.param(
        source, point, marks=[] if (source, point) == ("titan", "convert.noted;time=9") else pytest.mark.slow
    )
    for source in SOURCES
    for point in POINTS
]


def convert_noting(src, dst, arguments):
    convert(src, dst, **arguments, options=ConversionOptions(note_every=1000))


def unpacked(source, folder):
    """Return the checkpoint and a folder with the model's config."""
    archive, name = SOURCES[source]
    with tarfile.open(HERE / archive) as packed:
        packed.extractall(folder, filter="data")
    config = folder / "config"
    if source == "titan":
        write_hf_folder(config, CONFIG)
    else:
        config.mkdir()
        MODELS["llama"].write_config(config)
    return folder / name, config


@pytest.mark.parametrize(("source", "point"), KILLS)
def test_a_killed_conversion_of_a_foreign_checkpoint_goes_on(source, point, tmp_path_factory, tmp_path):
    checkpoint, config = unpacked(source, tmp_path_factory.mktemp("source"))
    arguments = {"config": config, "tensor": 2, "pipeline": 2}
    convert(checkpoint, tmp_path / "whole", **arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRILITH_FAULT", f"rank=0;at={point};act=kill")
        words = str(checkpoint), str(tmp_path / "out"), arguments
        (code,) = run_fresh(convert_noting, 1, *words, process_group=False)
    assert code == -9, code.output
    assert (tmp_path / "out").exists() == (point == "commit.after_rename")
    if point != "commit.after_rename":
        noted = [*tmp_path.glob("out.tmp-*/journal.jsonl")]
        assert len(noted) == ("noted" in point or "after_data" in point)
        convert(checkpoint, tmp_path / "out", **arguments)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} - {"out.tmp-lock"} == {"out", "whole"}
