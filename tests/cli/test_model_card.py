"""What is exported to Hugging Face's form carries a card: its base, its recipe, its licence."""

import pytest
from support.command_lines import make_inputs
from trilith.cli.app import run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model that has a card of its own, a run from it, and a run of adapters on it."""
    folder = tmp_path_factory.mktemp("cards")
    make_inputs(folder)
    (folder / "hf" / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Base\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        data = ("data.tokens=tokens", "data.sequence_length=16", "data.global_batch=1", "--quiet")
        for name, words in (("full", ()), ("lora", ("lora.r=2", "lora.target_modules=all-linear"))):
            model = f'model = {{ init_from = "{folder}/hf" }}\n[data]\n'
            (folder / f"{name}.toml").write_text(f'out = "{name}"\nsteps = 1\ndevice = "cpu"\n{model}')
            assert run(["train", f"{name}.toml", *words, *data]) == 0
    return folder


@pytest.mark.parametrize(
    ("words", "library", "holds"),
    [
        ("convert full {out} --to hf", "transformers", ["trained to step 1", "- Base: hf", "device = "]),
        ("convert lora {out} --to peft", "peft", ["- Base: hf", "[lora]", "r = 2"]),
        ("merge-lora hf lora {out}", "transformers", ["- Base: hf", "[lora]"]),
        ("convert hf {out} --to hf --dtype bfloat16", "transformers", ["converted with trilith"]),
    ],
)  # fmt: skip
def test_an_export_has_a_card(place, tmp_path, monkeypatch, words, library, holds):
    monkeypatch.chdir(place)
    assert run(words.format(out=tmp_path / "out").split()) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n") and f"library_name: {library}\n" in card
    for text in (*holds, "- Licence: apache-2.0"):
        assert text in card, card
    assert str(place) not in card, "a path of this machine"


def test_a_sharded_checkpoint_has_none(place, tmp_path):
    assert run(["convert", str(place / "hf"), str(tmp_path / "out"), "--tensor", "2"]) == 0
    assert not (tmp_path / "out" / "README.md").exists()
