"""A conversion of another project's checkpoint that is killed: absent or whole, and the same call goes on."""

import tarfile
from pathlib import Path

import pytest
from megatron_models import MODELS
from support.configs import WHOLE
from support.kills import Work, killed_work
from trilith.checkpoints import ConversionOptions, convert
from trilith.machine.random_files import write_hf_folder

HERE = Path(__file__).parent
CONFIG = WHOLE | {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
#: What the archives of the real writers hold: a folder of DCP and Megatron's two forms.
SOURCES = {
    "titan": ("titan.tar.xz", "titan"),
    "megatron": ("megatron/llama.tar.xz", "iter_0000003"),
    "megatron legacy": ("megatron/llama_legacy.tar.xz", "iter_0000003"),
}
POINTS = [
    "convert.before_data", *(f"convert.noted;time={time}" for time in range(1, 17)), "convert.after_data",
    "commit.before_rename", "commit.after_rename",
]  # fmt: skip
QUICK = ["convert.noted;time=9"]


def convert_foreign(src, dst, note_every):
    options = ConversionOptions(note_every=note_every)
    convert(src, dst, config=Path(src).parent / "config", tensor=2, pipeline=2, options=options)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Unpack each checkpoint, beside a folder with the model's config."""
    root = tmp_path_factory.mktemp("sources")
    for form, (archive, _) in SOURCES.items():
        with tarfile.open(HERE / archive) as packed:
            packed.extractall(root / form, filter="data")
        if form == "titan":
            write_hf_folder(root / form / "config", CONFIG)
        else:
            (root / form / "config").mkdir()
            MODELS["llama"].write_config(root / form / "config")
    return root


test_a_killed_conversion_of_a_foreign_checkpoint_is_absent_or_whole_and_goes_on = killed_work([
    Work(form, f"{form}/{name}", convert_foreign, 1000, POINTS, quick=QUICK if form == "titan" else [])
    for form, (_, name) in SOURCES.items()
])  # fmt: skip
