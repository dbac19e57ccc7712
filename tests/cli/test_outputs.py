"""No command writes over what it did not write, nor into its source or among a run's checkpoints.

Every parameter of every command that is a path stands in a table: one that is added turns a test red until it
does, and one that is written to is then tried like the others.
"""

import inspect
import os
import re
import typing
from pathlib import Path

import pytest
from support.configs import TINY_LLAMA
from support.folders import contents
from support.inputs import write_adapter, write_line_of_metrics
from support.short_runs import write_recipe
from trilith.checkpoints import convert
from trilith.cli.app import COMMANDS, run
from trilith.data.text.tokenizer_training import train_tokenizer
from trilith.machine.random_files import write_hf_folder, write_tokens
from trilith.parallel_state import BadInput
from trilith.storage import output_file
from trilith.storage.disk import DiskFailed

READ, FILE, FOLDER = "read", "a file", "a folder"
PATHS = {
    "quickstart": {"out": FOLDER},
    "models": {},
    "doctor": {"folders": READ},
    "bench": {"out": FOLDER},
    "convert": {"src": READ, "dst": FOLDER, "config": READ},
    "reshard": {"src": READ, "dst": FOLDER},
    "inspect": {"source": READ, "config": READ},
    "diff": {"a": READ, "b": READ, "config": READ},
    "verify": {"source": READ, "config": READ},
    "parity": {"folder": READ},
    "train_tokenizer": {"inputs": READ, "out": FOLDER, "chat_template": READ},
    "tokenize": {"inputs": READ, "tokenizer": READ, "out": FOLDER, "chat_template": READ},
    "plan": {"machine": READ, "write": FILE, "html": FILE},
    "train": {"recipe": READ},
    "launch": {"out": FILE},
    "status": {"run": READ, "since": READ},
    "report": {"runs": READ, "out": FILE},
    "merge_lora": {"base": READ, "adapter": READ, "out": FOLDER},
    "recipe": {"file": READ, "out": FILE},
    "schedule": {"out": FILE},
    "generate": {
        **{"source": READ, "prompts": READ, "out": FILE, "tokenizer": READ, "adapter": READ},
        "status": READ,  # hidden: where its ranks say how they are, in a folder of the command's own
    },
}
TEXT = "texts/a.txt"
#: Below a folder that ``world`` made: the words of each command that writes, and the folder that it reads.
WORDS = {
    "quickstart": (lambda out: ["quickstart", "--out", out], ""),
    "bench": (lambda out: ["bench", "--quick", "--device", "cpu", "--out", out], ""),
    "convert": (lambda out: ["convert", "hf", out, "--tensor", "2"], "hf"),
    "reshard": (lambda out: ["reshard", "sharded", out, "--tensor", "2"], "sharded"),
    "train_tokenizer": (lambda out: ["train-tokenizer", TEXT, "--vocab-size", "260", "--out", out], ""),
    "tokenize": (lambda out: ["tokenize", TEXT, "--tokenizer", "tokenizer", "--out", out], "tokenizer"),
    "report": (lambda out: ["report", "run", "--out", out], ""),
    "merge_lora": (lambda out: ["merge-lora", "hf", "adapter", out], "hf"),
    "plan": (lambda out: ["plan", "llama-3.2-1b", "--gpus", "1", "--seq", "512", "--html", out], ""),
    "launch": (lambda out: ["launch", "slurm", "llama-3.2-1b-1gpu", "--out", out], ""),
    "recipe": (lambda out: ["recipe", "from-deepspeed", "ds.json", "--out", out], ""),
    "schedule": (lambda out: ["schedule", "--name", "gpipe", "--stages", "2", "--out", out], ""),
    "generate": (lambda out: ["generate", "hf", "--prompt", "numbers", "--max-new-tokens", "2",
                              "--tokenizer", "tokenizer", "--out", out], "hf"),
}  # fmt: skip
FILES = [name for name, paths in PATHS.items() if FILE in paths.values()]
SUFFIX = {"schedule": ".png"}


def is_path(hint):
    return hint is Path or any(is_path(one) for one in typing.get_args(hint))


def test_every_path_of_every_command_stands_in_the_table():
    found = {
        command.__name__: [name for name, hint in typing.get_type_hints(command).items() if is_path(hint)]
        for command in COMMANDS
    }
    assert {name: sorted(paths) for name, paths in PATHS.items()} == {
        name: sorted(paths) for name, paths in found.items()
    }
    writing = {name for name, paths in PATHS.items() if {FILE, FOLDER} & {*paths.values()}}
    assert writing == {*WORDS}
    for command in COMMANDS:
        assert ("force" in inspect.signature(command).parameters) == (command.__name__ in FILES), command


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, its sharded twin, a run with a checkpoint, tokens, a tokenizer, a text, a configuration."""
    root = tmp_path_factory.mktemp("world")
    write_hf_folder(root / "hf", {**TINY_LLAMA, "vocab_size": 320})
    convert(root / "hf", root / "sharded", to="sharded")
    convert(root / "hf", root / "run" / "saved", to="sharded")
    (root / "run" / "checkpoints").mkdir()
    (root / "run" / "saved").rename(root / "run" / "checkpoints" / "step-00000001")
    write_line_of_metrics(root / "run")
    write_adapter(root / "adapter", root / "hf")
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_text("\n\n".join(f"number {i} of many words" for i in range(300)))
    train_tokenizer(["many words of numbers"] * 40, root / "tokenizer", vocab_size=275)
    (root / "ds.json").write_text('{"train_batch_size": 8}')
    write_tokens(root / "tokens")
    return root


@pytest.fixture
def world(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def check_refused(words, world, capfd, says):
    """Check for one line with code 2, and that every file is as before."""
    before = contents(world)
    assert run(words) == 2, words
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and re.search(says, err), err
    assert contents(world) == before


@pytest.mark.parametrize("name", FILES)
def test_what_exists_and_is_not_the_command_s_own_is_refused(world, tmp_path, capfd, name):
    suffix = SUFFIX.get(name, ".x")
    victims = {
        "weights": (world / "hf" / "model.safetensors").read_bytes(),
        "manifest": (world / "sharded" / "manifest.json").read_bytes(),
        "metrics": (world / "run" / "metrics.jsonl").read_bytes(),
        "notes": b"trilith schedule, trilith report: my notes\n",
        "page": b"<!DOCTYPE html><title>mine</title>",
        "picture": b"\x89PNG\r\n\x1a\n mine",
        "empty": b"",
    }
    for victim, content in victims.items():
        path = tmp_path / f"{victim}{suffix}"
        path.write_bytes(content)
        check_refused(WORDS[name][0](str(path)), world, capfd, "this command's own earlier output.*--force")
        assert path.read_bytes() == content
    (tmp_path / f"link{suffix}").symlink_to(tmp_path / f"notes{suffix}")
    check_refused(WORDS[name][0](str(tmp_path / f"link{suffix}")), world, capfd, "a link")
    os.mkfifo(tmp_path / f"pipe{suffix}")
    check_refused(WORDS[name][0](str(tmp_path / f"pipe{suffix}")), world, capfd, "a pipe or a device")


@pytest.mark.parametrize("name", FILES)
def test_force_replaces_it_and_its_own_is_replaced_without(world, tmp_path, capfd, name):
    for suffix in (".png", ".svg", ".pdf") if name == "schedule" else (".x",):
        out = tmp_path / f"out{suffix}"
        out.write_text("mine")
        words = WORDS[name][0](str(out))
        assert run([*words, "--force"]) == 0, capfd.readouterr().err
        assert out.read_bytes() != b"mine"
        capfd.readouterr()
        if name in ("recipe", "launch"):  # they are there to be edited
            check_refused(words, world, capfd, "--force")
        else:
            out.write_bytes(out.read_bytes())
            assert run(words) == 0, capfd.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == [out.name]
        out.unlink()


@pytest.mark.parametrize("name", WORDS)
def test_no_output_lies_in_the_source_or_among_checkpoints(world, tmp_path, capfd, monkeypatch, name):
    words, source = WORDS[name]
    force = ["--force"] if name in FILES else []
    places = ["run/checkpoints", "run/checkpoints/step-00000001", "sharded"]
    for place in [*places, *([source] if source else [])]:
        out = world / place / f"out{SUFFIX.get(name, '')}"
        check_refused([*words(str(out)), *force], world, capfd, "outside")
        # As a bind mount does: another path, that no resolving leads back.
        (tmp_path / "mount").symlink_to(world / place)
        with monkeypatch.context() as patch:
            patch.setattr(os.path, "realpath", os.path.abspath)
            check_refused([*words(str(tmp_path / "mount" / out.name)), *force], world, capfd, "outside")
        (tmp_path / "mount").unlink()


def test_a_run_s_folder_is_not_its_model_s_nor_among_checkpoints(world, tmp_path, capfd):
    data = {"tokens": str(world / "tokens"), "sequence_length": 16, "global_batch": 4}
    raw = {"out": "run-b", "steps": 1, "model": {"init_from": str(world / "hf")}, "data": data}
    path = write_recipe(tmp_path / "recipe.toml", raw)
    for out in ("hf", "hf/run", "run/checkpoints", "run/checkpoints/step-00000001/run"):
        check_refused(["train", str(path), f"out={out}"], world, capfd, "outside")


def test_of_two_writers_of_one_new_file_the_first_wins(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(BadInput, match="own earlier output"), output_file.output_file(out) as path:
        path.write_text("second")
        with output_file.output_file(out) as other:
            other.write_text("first")
    assert out.read_text() == "first" and [*tmp_path.iterdir()] == [out]


def test_an_error_leaves_nothing_and_a_killed_writer_s_file_is_removed(tmp_path):
    out = tmp_path / "new" / "folder" / "out"
    with pytest.raises(DiskFailed, match="full"), output_file.output_file(out, parents=True) as path:
        path.write_text("half")
        raise OSError("full")
    assert not [*tmp_path.iterdir()]
    mine = tmp_path / "a.tmp-mine"
    mine.write_text("mine")
    (tmp_path / "a.tmp-0123456789abcdef").write_text("half")
    with output_file.output_file(tmp_path / "a") as path:
        path.write_text("whole")
    assert {one.name for one in tmp_path.iterdir()} == {"a", "a.tmp-mine"}
