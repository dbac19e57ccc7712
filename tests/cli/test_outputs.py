"""No output replaces what is not its own, nor lies in a source or among checkpoints; exports carry a card."""

import os
import re

import pytest
from support import command_lines as calls
from support.command_lines import make_inputs
from support.folders import contents
from support.short_runs import write_recipe
from trilith.checkpoints import convert
from trilith.cli.app import run
from trilith.parallel_state import BadInput
from trilith.storage.disk import DiskFailed
from trilith.storage.staging import output_file

#: The output of each command that writes one file, and then has ``--force``.
FILES = {
    name: "html" if name == "plan" else "out"
    for name in calls.NAMES
    if "force" in {parameter for parameter, *_ in calls.parameters_of(name)}
}
#: The output of each command that writes, and what some read that is a folder.
WRITTEN = {place.command: place.name for place in calls.places() if place.output and not place.key} | FILES
SOURCES = {"tokenize": "tokenizer"} | dict.fromkeys(("convert", "merge_lora", "generate"), "hf")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Good inputs of all commands; the run has a checkpoint."""
    root = tmp_path_factory.mktemp("world")
    calls.make_inputs(root)
    convert(root / "hf", root / "run" / "saved", to="sharded")
    (root / "run" / "checkpoints").mkdir()
    (root / "run" / "saved").rename(root / "run" / "checkpoints" / "step-00000001")
    return root


@pytest.fixture
def world(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def words_to(name, world, out):
    """Return a command line of which everything is valid but for its output, perhaps."""
    values = calls.values_of(name, world, world)
    inputs = {key: value for key, value in values.items() if key not in calls.OUTPUTS}
    return calls.words_of(name, inputs | {WRITTEN[name]: [str(out)]})


def check_refused(words, world, capfd, says):
    """Check for one line with code 2, and that every file is as before."""
    before = contents(world)
    assert run(words) == 2, words
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and re.search(says, err), err
    assert contents(world) == before


#: Commands whose files people edit, so that none is taken for the command's own.
EDITED = ("launch", "new", "recipe")


@pytest.mark.parametrize("name", FILES)
def test_what_exists_and_is_not_the_command_s_own_is_refused(world, tmp_path, capfd, name):
    suffix = calls.SUFFIXES.get(name, ".x")
    victims = {
        "weights": (world / "hf" / "model.safetensors").read_bytes(),
        "manifest": (world / "sharded" / "manifest.json").read_bytes(),
        "metrics": (world / "run" / "metrics.jsonl").read_bytes(),
        "notes": b"trilith schedule, trilith report: my notes\n",
        "page": b"<!DOCTYPE html><title>mine</title>",
        "continuation": b'{"id": 7, "prompt": "", "tokens": 1, "finish": "stop"}\n',
        "picture": b"\x89PNG\r\n\x1a\n mine",
        "empty": b"",
    }
    for victim, content in victims.items():
        path = tmp_path / f"{victim}{suffix}"
        path.write_bytes(content)
        taken = "may have edited" if name in EDITED else "this command's own earlier output"
        check_refused(words_to(name, world, path), world, capfd, f"{taken}.*--force")
        assert path.read_bytes() == content
    (tmp_path / f"link{suffix}").symlink_to(tmp_path / f"notes{suffix}")
    check_refused(words_to(name, world, tmp_path / f"link{suffix}"), world, capfd, "a link")
    os.mkfifo(tmp_path / f"pipe{suffix}")
    check_refused(words_to(name, world, tmp_path / f"pipe{suffix}"), world, capfd, "a pipe or a device")


@pytest.mark.parametrize("name", FILES)
def test_force_replaces_it_and_its_own_is_replaced_without(world, tmp_path, capfd, name):
    for suffix in (".png", ".svg", ".pdf") if name == "schedule" else (".x",):
        out = tmp_path / f"out{suffix}"
        out.write_text("mine")
        words = words_to(name, world, out)
        assert run([*words, "--force"]) == 0, capfd.readouterr().err
        assert out.read_bytes() != b"mine"
        capfd.readouterr()
        if name in EDITED:  # they are there to be edited
            check_refused(words, world, capfd, "--force")
        else:
            out.write_bytes(out.read_bytes())
            assert run(words) == 0, capfd.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == [out.name]
        out.unlink()


@pytest.mark.parametrize("name", FILES)
def test_no_output_replaces_an_input(world, capfd, name):
    values = calls.values_of(name, world, world)
    read = [value for key, (value, *_) in values.items() if key not in calls.OUTPUTS]
    read += [str(world / "run" / "metrics.jsonl")] if name == "report" else []
    read += [str(world / "tokens.bin"), str(world / "tokens.json")] if name == "new" else []
    files = [path for path in read if os.path.isfile(path)]
    assert files or name == "schedule", "it reads none"
    for file in files:
        for force in ([], ["--force"]):
            check_refused([*words_to(name, world, file), *force], world, capfd, "than the input")


@pytest.mark.parametrize("name", sorted({*WRITTEN} - {"train"}))
def test_no_output_lies_in_the_source_or_among_checkpoints(world, tmp_path, capfd, monkeypatch, name):
    force = ["--force"] if name in FILES else []
    for place in (
        "run/checkpoints",
        "run/checkpoints/step-00000001",
        SOURCES.get(name, "sharded"),
        "sharded",
    ):
        out = world / place / f"out{calls.SUFFIXES.get(name, '')}"
        check_refused([*words_to(name, world, out), *force], world, capfd, "outside")
        # As a bind mount does: another path, that no resolving leads back.
        (tmp_path / "mount").symlink_to(world / place)
        with monkeypatch.context() as patch:
            patch.setattr(os.path, "realpath", os.path.abspath)
            check_refused(
                [*words_to(name, world, tmp_path / "mount" / out.name), *force], world, capfd, "outside"
            )
        (tmp_path / "mount").unlink()


def test_a_run_s_folder_is_not_its_model_s_nor_among_checkpoints(world, tmp_path, capfd):
    data = {"tokens": str(world / "tokens"), "sequence_length": 16, "global_batch": 4}
    raw = {"out": "run-b", "steps": 1, "model": {"init_from": str(world / "hf")}, "data": data}
    path = write_recipe(tmp_path / "recipe.toml", raw)
    for out in ("hf", "hf/run", "run/checkpoints", "run/checkpoints/step-00000001/run"):
        check_refused(["train", str(path), f"out={out}"], world, capfd, "outside")


def test_a_second_writer_of_a_file_is_refused_and_so_is_a_file_that_appears(tmp_path):
    out = tmp_path / "out"
    with output_file(out) as path:
        path.write_text("first")
        with pytest.raises(BadInput, match="another process writing it"), output_file(out):
            pass
    assert out.read_text() == "first" and [*tmp_path.iterdir()] == [out]
    out.unlink()
    with pytest.raises(BadInput, match="may have edited"), output_file(out) as path:
        path.write_text("second")
        out.write_text("somebody's")
    assert out.read_text() == "somebody's" and [*tmp_path.iterdir()] == [out]


def test_an_error_leaves_nothing_and_a_killed_writer_s_file_is_removed(tmp_path):
    out = tmp_path / "new" / "folder" / "out"
    with pytest.raises(DiskFailed, match="full"), output_file(out, parents=True) as path:
        path.write_text("half")
        raise OSError("full")
    assert not [*out.parent.iterdir()]
    mine = tmp_path / "a.tmp-mine"
    mine.write_text("mine")
    (tmp_path / "a.tmp-0123456789abcdef").mkdir()
    (tmp_path / "a.tmp-0123456789abcdef" / "a").write_text("half")
    with output_file(tmp_path / "a") as path:
        path.write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a.tmp-mine", "new"}


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
